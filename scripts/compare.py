"""Compare precisions, or any overrides: ``python scripts/compare.py recipe=gpt2 arms=fp32,bf16,fp16 seeds=5``.

  arms=fp32,bf16            precisions
  arm.<name>="key=value …"  any overrides, as often as wanted, such as arm.compiled="precision=bf16 compile=default"
  baseline=<name>           what the others are compared with (default: the first arm)
  seeds=5 or seeds=3,4,5    pairs of runs (default: 5)
  margin=0.3%               the difference in final validation loss that is too small to matter
  null=false                without the null arm (the baseline against itself with other seeds)
  name=<name>               of the folder in <output_dir>/compare, where the same command goes on after a stop
Everything else goes to every run, as to train.py.
Exit code: 0, 1 when a run failed, 2 for a mistake, 130 when interrupted.
"""

from __future__ import annotations

import signal
import sys

from trainer.errors import RunError


def main(arguments: list[str]) -> int:
    """Parse the options, train the arms, report."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # into a file, too, a line a run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from evidence.comparison.compare import check_arms, compare, parse, tracking_uri_of

    try:
        about = parse(arguments)
        configs = check_arms(about)
        result = compare(about, configs)
        from evidence.comparison.report import sentences, table, write_report

        files = write_report(result, ["python", "scripts/compare.py", *arguments])
        print(f"\n{table(result)}\n")
        for sentence in sentences(result):
            print(sentence)
        print(f"\nreport {files[0]}")
        uri = tracking_uri_of(configs[about.baseline])
        if uri:
            from evidence.comparison.mlflow import publish

            print("\n".join(publish(result, uri, files)))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
