"""A child for scripts/certify.py that does not restore the random state when it resumes."""

import sys

from evidence.certificate import child
from mantissa.generators import random_state, set_random_state
from trainer.checkpoint.reader import CheckpointReader
from trainer.trainer import Trainer


class ForgetfulTrainer(Trainer):
    """Forgets the generators."""

    def restore(self, saved: CheckpointReader) -> None:
        before = random_state(self.device)
        super().restore(saved)
        set_random_state(before, self.device)


if __name__ == "__main__":
    child.TracedRun.trainer_class = ForgetfulTrainer
    sys.exit(child.main())
