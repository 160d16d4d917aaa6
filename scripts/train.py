"""Train a recipe: ``python scripts/train.py recipe=gpt2 precision=bf16`` (``--help`` lists every choice)."""

from trainer.run.signals import begin_program, end_program

if __name__ == "__main__":
    begin_program()  # before the imports below, which take seconds

from trainer.run.command import main

if __name__ == "__main__":
    end_program(main())
