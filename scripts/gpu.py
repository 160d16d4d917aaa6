"""Measure what is worth most on a new GPU machine, in order, within a budget of time.

  python scripts/gpu.py                 all stages: rates, tests, gpt2_eager, gpt2_compiled, gpt2_master,
                                        resnet50_eager, resnet50_compiled, gpt2_profile, resnet50_profile,
                                        claims, bench

  budget=28min       for this call (also 90s, 1h); the next call continues with what is not done at this commit
  only=tests,claims  run these, also if they are done
  data.path=…        the text that the claim shakespeare_gpu asks for
  reduced=true       everything at a tiny size: a rehearsal on a CPU
  device=auto        as for train.py
  output_dir=…       folder of the stages (default: outputs/programme)
Each stage has a limit of time and writes its output before the next begins; one that fails does not stop the others.
If the variable OUT names a folder, what is worth keeping is copied there after each stage.
scripts/gpu.sh runs this on a machine without network, with the packages from a folder of wheels.
Exit code: 0, 1 when a stage failed, 2 for a user error, 130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.programme.command:main", __doc__, continues=True))
