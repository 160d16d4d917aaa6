"""Find why a run is not finite, or worse in 16 bits: python scripts/doctor.py resume=outputs/gpt2-fp16-s0

  resume=FOLDER     folder of the run, or mlflow:RUN_ID (resume= may be left out)
  step=0            step to examine, from 1 (default: the one that failed; of a finished run, the next; else the first)
  check=all         or some of formats,manifest,gradients,range,data,modules,updates,state,divergence,islands
  time_budget=60s   for the checks (such as 90s or 5min), after the step is reached; what does not fit is named
All other arguments are those of train.py. The run is not changed; the report goes to <run>/doctor/step-N.
For a model that is no recipe: python -m mantissa doctor --help
Exit code: 0 HEALTHY, 7 FOUND, 8 NOT REPRODUCED, 3 INCOMPLETE or CRASHED, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.doctor.command:main", __doc__))
