"""Certify that a job resumes exactly: ``python scripts/certify.py recipe=gpt2 precision=bf16 [kills=20] [key=value]``.

Runs the job twice without interruption and once with SIGKILLs at named moments, and compares every step and tensor.

  kills=20             how often the last run is killed
  seed=0               decides when and how it is killed
  max_ulp=4            differences up to so many units in the last place count as equal within rounding
  output_dir=outputs   folder of the runs and the certificate
All other arguments are passed to the job, as for train.py.
Exit code: 0 BITWISE, 5 equal within max_ulp, 6 DIVERGED or NOT RESUMED, 2 for a user error or a job that fails
undisturbed, 130 if interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.certificate.certify:main", __doc__, options="evidence.options:CertifyOptions"))
