"""Test published claims about mixed precision on this machine.

  python scripts/reproduce.py                    the claims, and every verdict so far
  python scripts/reproduce.py claim=two_x        test one, or several: claim=two_x,cpu_bf16
  python scripts/reproduce.py all=true           test all claims that this machine can test, by value

  budget=25min       end after this time (also 90s, 1h), with the run that is under way; the next call continues
  reduced=true       run at a tiny size, to check that it works; no verdict and no record
  submit=true        with claim=… or all=true: also write each outcome as a file to send (see CONTRIBUTING.md)
  add=FILE           check such a file, and add it to results/
  pages=true         only write docs/results.md and the tables of docs/claims.md and README.md
  device=cpu         as for train.py
  output_dir=…       folder of the runs (default: outputs)
  data.path=…        and other overrides that a claim needs
After a stop, the same command continues, at the same commit. Outcomes are appended to results/<machine>/claims.jsonl,
and shown in docs/results.md and docs/claims.md.
Exit code: 0 whatever the verdict, 1 when a run failed, 2 for a user error or a claim that needs another machine,
130 when interrupted.
"""

import sys

from trainer.config.options import run

if __name__ == "__main__":
    sys.exit(run("evidence.claims.command:main", __doc__, options="evidence.options:ReproduceOptions", continues=True))
