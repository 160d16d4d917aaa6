"""What to measure next, from what has been measured: successive halving over the promising settings."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from evidence.advice.candidates import Setting, Space
from evidence.advice.rounds import interval
from evidence.advice.schema import LEFT_OUT, TWIN, Log, Round, compiles

AHEAD = 1.02
"""One setting is ahead of another where the interval of their ratio lies above."""
EQUAL = 1.03
"""Two settings are equal where the interval lies within this factor; among such, the simplest is advised."""
TIME_FOR_MEMORY = 1.5
"""Times the baseline's time that a step may take for goal=memory."""
LEAST_MEMORY = 1.01
"""Two settings need the same memory within this factor."""
FIRST, SINGLE, COMBINED, NEIGHBOURS = "precisions", "single changes", "combinations", "neighbours of the best"
HALVING = "halving"
"""Kinds of rounds."""
REPEATS = 3
"""Blocks of each candidate in the first rounds; each round of the halving has twice as many as the one before."""
EXPLORATIONS, HALVINGS = 6, 4
"""Rounds at most, of combinations and neighbours together, and of halving."""
FEW = 6
"""Settings that are tried at once, beyond the single changes."""
_HELPS = 0.01
"""Logarithm of the ratio from which on a change is combined with others."""
_WORTH = 0.25
"""Logarithm of the ratio that an untried change of the best may be expected to lose: together it may gain."""
_NEAR = 0.15
"""Logarithm of the ratio to the best, up to which a setting is worth another look."""


@dataclass
class Plan:
    """Reads the log, and says which settings come next."""

    space: Space
    log: Log
    goal: str
    steps: int
    """Optimizer steps of the user's run. For goal=speed, whole runs of so many are compared, compile times included."""
    late: set[str] = field(default_factory=set)
    """Labels of candidates for which there was no time."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Labels that are not to be advised, each with the reason as a sentence for the user."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """What the doctor found, by label; those with faults are excluded, too."""
    unconfirmed: set[str] = field(default_factory=set)
    """Labels that are excluded because the final round did not confirm them."""

    def __post_init__(self) -> None:
        self.excluded |= {label: in_words(label, faults) for label, faults in self.faults.items()}
        every = itertools.product(*(range(len(factor.values)) for factor in self.space.factors))
        self._labels = {setting: self.space.candidate(setting).label for setting in every}
        self._settings = {label: setting for setting, label in self._labels.items()}
        self._some_compile = len(set(map(compiles, self._settings))) > 1
        self._known: tuple[object, dict[Setting, float]] = (None, {})

    def label(self, setting: Setting) -> str:
        """Return the label of a setting."""
        return self._labels[setting]

    def setting(self, label: str) -> Setting | None:
        """Return the setting of a label; None: it is of none."""
        return self._settings.get(label)

    @property
    def reference(self) -> Setting | None:
        """What ratios are over: the baseline; where it fails, the first setting that works. None: none does."""
        allowed = (setting for setting in self.known() if self.label(setting) not in self.excluded)
        known = [setting for setting in allowed if self.log.ok(self.label(setting))]
        base = self.space.baseline
        return base if base in known else known[0] if known else None

    def known(self) -> list[Setting]:
        """Return the settings that have been started or left out, in the order of their first turn."""
        return [self._settings[label] for label in self.log.records if label in self._settings]

    @property
    def compile_s(self) -> float:
        """Seconds to compile a candidate: the median of all that compile, since a single time is not exact."""
        times = [self.log.compile_s(label) for label in self.log.records if compiles(label) and self.log.ok(label)]
        return statistics.median(times) if times else 0.0

    def ratios(self, label: str, over: str, rounds: Sequence[Round] | None = None) -> list[float]:
        """Return how many times as fast as ``over`` it is, in the order of ``Log.ratios``.

        For goal=speed it is in a run of ``steps`` with the time to compile, unless all settings or none compile.
        """
        extra_s = self.compile_s / self.steps if self.goal == "speed" and self._some_compile else 0.0
        own_s, over_s = extra_s * compiles(label), extra_s * compiles(over)
        return [(other + over_s) / (own + own_s) for own, other in self.log.pairs(label, over, rounds)]

    def speed(self, setting: Setting) -> float:
        """Return the logarithm of its speed over the reference's; minus infinity where it was not measured.

        It is the median of all pairs, on which a single block that another program has slowed down has little effect.
        """
        reference = self.reference
        if reference is None or not self.log.ok(self.label(setting)):
            return -math.inf
        ratios = self.ratios(self.label(setting), self.label(reference))
        return statistics.median(map(math.log, ratios)) if ratios else -math.inf

    def merit(self, setting: Setting) -> float:
        """Return how much better than the reference it is, as a logarithm; minus infinity where it is no candidate."""
        now = [(len(done.times), sum(map(len, done.times.values()))) for done in self.log.rounds]
        version = (now, [record.status for record in self.log.records.values()])
        if self._known[0] != version:
            self._known = (version, {})
        merits = self._known[1]
        if setting not in merits:
            merits[setting] = self._merit(setting)
        return merits[setting]

    def _merit(self, setting: Setting) -> float:
        speed = self.speed(setting)
        if self.goal == "speed" or speed == -math.inf:
            return speed
        assert self.reference is not None
        own, other = (self.log.records[self.label(each)].memory_bytes for each in (setting, self.reference))
        if speed < -math.log(TIME_FOR_MEMORY) or not own or not other:
            return -math.inf
        return math.log(other / own)

    def ranked(self) -> list[Setting]:
        """Return the settings that were measured and are candidates, the best first."""
        known = (setting for setting in self.known() if self.label(setting) not in self.excluded)
        found = [setting for setting in known if self.merit(setting) > -math.inf]
        return sorted(found, key=self.merit, reverse=True)

    def first(self) -> list[Setting]:
        """Return the baseline and the other precisions."""
        position = self.space.factor("precision")
        assert position is not None
        values = range(len(self.space.factors[position].values))
        return [self.space.changed(self.space.baseline, position, value) for value in values]

    @property
    def anchor(self) -> Setting:
        """The best precision, else the baseline; single changes are tried from here."""
        tried = [setting for setting in self.first() if self.merit(setting) > -math.inf]
        return max(tried, key=self.merit, default=self.space.baseline)

    def single_changes(self) -> list[Setting]:
        """Return the anchor with one change, at most three values of a factor."""
        precision = self.space.factor("precision")
        anchor = self.anchor
        changes = self.space.one_change(anchor, reach=3)
        return self.untried([each for each in changes if precision is None or each[precision] == anchor[precision]])

    def next(self, explore: bool) -> tuple[str, list[Setting], int] | None:
        """Return the next round: its kind, its settings, and how many blocks each takes; None: the choice is made.

        Args:
            explore: whether there is time for settings that were not tried yet.
        """
        kinds = [done.kind for done in self.log.rounds]
        if FIRST not in kinds:
            return FIRST, self.first(), REPEATS
        if SINGLE not in kinds and (found := self.single_changes()):
            return SINGLE, [self.anchor, *found], REPEATS
        if not (ranked := self.ranked()):
            return None
        if explore and kinds.count(COMBINED) + kinds.count(NEIGHBOURS) < EXPLORATIONS:
            for kind, settings in ((COMBINED, self.combinations), (NEIGHBOURS, self.neighbours)):
                if found := settings():
                    return kind, [*ranked[:2], *found], REPEATS
        contenders = self.contenders()
        number = kinds.count(HALVING)
        if self.decided(contenders) or number == HALVINGS:
            return None
        most = math.ceil(2 * FEW / 2**number)
        return HALVING, contenders[: max(2, most)], REPEATS * 2 ** (number + 1)

    @property
    def null_ratios(self) -> list[float]:
        """The ratios of the null pairs: the reference's second process over its first, in all rounds."""
        if self.reference is None:
            return []
        label = self.label(self.reference)
        return self.log.ratios(label + TWIN, label, self.log.rounds)

    @property
    def noise(self) -> float:
        """The spread of the null pairs: the highest of their ratios over the lowest, minus 1."""
        ratios = self.null_ratios
        return max(ratios) / min(ratios) - 1 if ratios else 0.0

    def untried(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return those that have not been started and are forecast to fit; none compiles where that took too long."""
        fresh = [setting for setting in settings if self.label(setting) not in self.log.records.keys() | self.late]
        compiled = [label for label in self.log.records if compiles(label)]
        if any(self.log.records[label].status == LEFT_OUT for label in compiled) and not any(
            map(self.log.ok, compiled)
        ):
            fresh = [setting for setting in fresh if not compiles(self.label(setting))]
        return [setting for setting in fresh if self.space.refused(self.space.candidate(setting)) is None]

    def effect(self, factor: int, value: int) -> float:
        """Return the most that a change added to the merit of a measured setting; 0 where that is not known.

        A pair of settings that differ in nothing else measures it.
        """
        tried = {setting: self.merit(setting) for setting in self.ranked()}
        pairs = ((setting, self.space.changed(setting, factor, 0)) for setting in tried if setting[factor] == value)
        differences = [tried[setting] - tried[without] for setting, without in pairs if without in tried]
        return max(differences) if differences else 0.0

    def combinations(self) -> list[Setting]:
        """Return untried settings of changes that help, those with the highest expected merit first."""
        best = self.ranked()[0]
        precision = self.space.factor("precision")
        choices: list[list[int]] = []
        effects: list[dict[int, float]] = []
        for index, factor in enumerate(self.space.factors):
            known = {value: self.effect(index, value) for value in range(1, len(factor.values))}
            values = {0, best[index]} | {value for value, effect in known.items() if effect > _HELPS}
            if index == precision:
                values = {best[index]} | {
                    value for value in values if abs(known.get(value, 0.0) - known.get(best[index], 0.0)) < _NEAR
                }
            choices.append(sorted(values))
            effects.append({0: 0.0, **known})
        expected = {
            setting: sum(effects[index][value] for index, value in enumerate(setting))
            for setting in itertools.product(*choices)
        }
        worth = [setting for setting, merit in expected.items() if merit > self.merit(best) - _HELPS]
        worth.sort(key=lambda setting: (-round(expected[setting], 2), self.space.changes(setting)))
        return self.untried(worth)[:FEW]

    def neighbours(self) -> list[Setting]:
        """Return the best setting with one more change, or one fewer, where it is untried and not clearly worse."""
        best = self.ranked()[0]
        found = []
        for setting in self.space.one_change(best):
            index = next(index for index, value in enumerate(setting) if value != best[index])
            loss = self.effect(index, best[index]) - self.effect(index, setting[index])
            if loss < _WORTH:
                found.append((loss, setting))
        return self.untried([setting for _, setting in sorted(found)])[:FEW]

    def contenders(self) -> list[Setting]:
        """Return the best setting, and those that are not clearly slower (or, for memory, larger) than it."""
        ranked = self.ranked()
        if self.goal == "memory":
            near = math.log(LEAST_MEMORY)
            return [setting for setting in ranked if self.merit(ranked[0]) - self.merit(setting) < near]
        return [setting for setting in ranked if setting == ranked[0] or not self.ahead(ranked[0], setting)]

    def ahead(self, one: Setting, other: Setting) -> bool:
        """Return whether one setting is ahead of the other for certain, or so far that it need not be certain."""
        if self.merit(one) - self.merit(other) > max(_NEAR, math.log1p(self.noise)):
            return True
        found = interval(self.ratios(self.label(one), self.label(other)))
        return found is not None and found.low > AHEAD

    def equal(self, one: Setting, other: Setting) -> bool:
        """Return whether the two are equally fast for certain."""
        found = interval(self.ratios(self.label(one), self.label(other)))
        return found is not None and found.low > 1 / EQUAL and found.high < EQUAL

    def decided(self, contenders: list[Setting]) -> bool:
        """Return whether more blocks would not change the choice."""
        if self.goal == "memory":
            return True
        return all(self.equal(contenders[0], other) for other in contenders[1:])

    def choose(self, contenders: list[Setting]) -> Setting:
        """Return the simplest of the settings that are as good as the best."""
        near = math.log(EQUAL if self.goal == "speed" else LEAST_MEMORY)
        best = self.merit(contenders[0])
        alike = [setting for setting in contenders if best - self.merit(setting) < near]
        return min(alike, key=lambda setting: (self.space.changes(setting), -self.merit(setting)))

    def eager(self, setting: Setting) -> Setting | None:
        """Return the same setting without torch.compile; None: it does not compile."""
        position = self.space.factor("compile")
        if position is None or not compiles(self.label(setting)) or len(self.space.factors[position].values) < 2:
            return None
        return self.space.changed(setting, position, 1 - setting[position])


def in_words(label: str, faults: Sequence[str]) -> str:
    """Return why a setting with faults is not advised."""
    return f"{label} is not advised, because the doctor found a fault in it: {'; '.join(faults)}"
