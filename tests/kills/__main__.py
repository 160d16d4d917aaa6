"""The long form: kills at random moments of all kinds, until there were so many.

python -m tests.kills [kills=200] [seed=0] [workers=2]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import shortcuts
from tests.kills.harness import JOBS, PLAN, compared, placed


@dataclass
class Campaign:
    """Rounds of all jobs in turn, several at a time."""

    folder: Path
    seed: int
    counted: Counter[str] = field(default_factory=Counter)
    """Kills at each moment."""
    unlike: int = 0
    """Rounds in which something differs."""

    def run(self, kills: int, workers: int) -> None:
        """Kill until there were so many."""
        self.folder.mkdir()
        os.environ[shortcuts.STORE] = str(self.folder / "empty.db")
        self.store = shortcuts.migrated()
        numbers = iter(range(10**9))
        with ThreadPoolExecutor(workers) as pool:
            self.whole = dict(zip(JOBS, pool.map(self._undisturbed, JOBS), strict=True))
            while self.counted.total() < kills:
                for _ in pool.map(self._round, [next(numbers) for _ in range(workers)]):
                    pass

    def _undisturbed(self, name: str) -> tuple[Path, dict[str, int]]:
        with placed(name, self.folder / f"{list(JOBS).index(name)}-whole", self.store) as place:
            process = place.start("file:0:0")
            assert process.wait() == 0, place.log.read_text()
            return place.until_done(), json.loads((place.folder / "counts.json").read_text())

    def _round(self, number: int) -> None:
        name = list(JOBS)[number % len(JOBS)]
        draw, job, (whole, counts) = random.Random(f"{self.seed} {number}"), JOBS[name], self.whole[name]
        moments = [draw.choice((*PLAN, *job.own * 2)) for _ in range(draw.randint(2, 6))]
        set_up = "set-up" in moments
        if set_up:  # which comes only once
            moments = ["set-up", *(moment for moment in moments if moment != "set-up")]
        here, killed = self.folder / f"{number:03}", []
        with placed(name, here, self.store, draw=draw, counts=counts, set_up=set_up) as place:
            try:
                killed += [moment for moment in moments if place.kill_at(moment)]
                found = compared(whole, place.until_done())
            except AssertionError as error:
                found = {"ended otherwise": [str(error)[-2000:]]}
        self.counted.update(killed)
        self.unlike += any(found.values())
        if not any(found.values()):  # what is kept is to be looked at
            shutil.rmtree(here)
        text = "; ".join(difference for differences in found.values() for difference in differences[:3])
        print(f"{number:03} {name}: killed at {', '.join(killed) or 'no time'}: {text or 'equal'}", flush=True)


def main() -> int:
    """Run the long form in ``kills/``; the exit code is 1 where anything differed."""
    given = {"kills": 200, "seed": 0, "workers": 2}
    given |= {key: int(value) for key, value in (argument.split("=", 1) for argument in sys.argv[1:])}
    campaign = Campaign(Path("kills").resolve(), given["seed"])
    campaign.run(given["kills"], given["workers"])
    print(
        f"{campaign.counted.total()} kills, {campaign.unlike} rounds differ: {dict(sorted(campaign.counted.items()))}"
    )
    return int(campaign.unlike > 0)


if __name__ == "__main__":
    sys.exit(main())
