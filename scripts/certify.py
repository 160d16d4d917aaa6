"""Certify that a job resumes exactly: ``python scripts/certify.py recipe=gpt2 precision=bf16 [kills=20] [key=value]``.

Runs the job once without interruption and once with repeated SIGKILLs, and compares every step and every tensor.

  kills=20             how often the second run is killed
  seed=0               decides when and how it is killed
  max_ulp=4            differences up to so many units in the last place count as equal within rounding
  output_dir=outputs   folder of both runs and the certificate
All other arguments are passed to the job, as for train.py.
Exit code: 0 BITWISE, 5 equal within max_ulp, 6 DIVERGED, 2 for a user error, 1 when a run failed, 130 if interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.certificate.certify:main", __doc__, options="evidence.options:CertifyOptions"))
