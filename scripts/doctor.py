"""Find why a run is not finite, or trains worse in 16 bits: ``python scripts/doctor.py resume=outputs/gpt2-fp16-s0``.

  resume=FOLDER         the run: the step that failed is replayed and examined; or mlflow:RUN_ID
                        (resume= may be left out, as in: python scripts/doctor.py outputs/gpt2-fp16-s0)
  step=0                the step to examine, counted from 1 (default: of a run the one that failed, else the next one;
                        without resume= the first one, as in: python scripts/doctor.py recipe=gpt2 precision=fp16)
  check=all             or some of formats,manifest,gradients,range,modules,updates,state,divergence,islands
  time_budget=60s       time for the checks, without the start and replayed steps; what does not fit is named
All other arguments are as for train.py. Nothing of the run is changed; the report goes to <run>/doctor/step-N.
Exit code: 0 HEALTHY, 7 FOUND, 8 NOT REPRODUCED, 3 CRASHED or INCOMPLETE, 2 for a user error, 1 when it failed, 130
when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.doctor.command:main", __doc__))
