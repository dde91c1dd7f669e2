"""How a rank agrees with the others on a step through the agent: it asks, answers, and waits if it must.

In a healthy step a rank reads one number of its heartbeat page and writes one: no system call, no collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from outlast.agreement.policy.steps import NOTHING, Answer, Move, Proposal, StepParticipant, Want
from outlast.ipc.control import Reporter
from outlast.ipc.heartbeat_page import HeartbeatPage
from outlast.ports import ExchangeFailed

_PATIENCE = 1800.0  # torch's own for gloo: training's collectives give up no later
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02  # seconds between two looks at the page
_BEAT_EVERY = 0.2  # seconds; a rank that waits here is alive

Terms = tuple[float, float, Mapping[str, float]]


class AgentAgreement:
    """One rank's part; rounds follow one another, and every rank begins each after the same step.

    Args:
        page: of this rank; its agent takes part.
        control_path: of the agent's control socket.
        terms: returns when the job is expected to end, when this rank must have exited, and how long its
            saves took, by tier.
    """

    def __init__(self, page: HeartbeatPage, control_path: str, terms: Callable[[], Terms]) -> None:
        self._page = page
        self._words = page.agreement
        self._reporter = Reporter(control_path)
        self._terms = terms
        self._part = StepParticipant()
        self._round = self._words.round
        self._ticket = 0
        self._wants = NOTHING
        self._at_wants = threading.Lock()  # a signal's thread asks, too

    def ask(self, want: Want) -> None:
        """Ask all ranks for something; from any thread."""
        with self._at_wants:
            if want in self._wants:
                return
            self._wants |= want
            self._words.terms(*self._terms())
            self._words.want(self._wants)
        self._reporter.nudge()

    def take_back(self, want: Want) -> None:
        """Ask for something no more."""
        with self._at_wants:
            if want & self._wants:
                self._wants &= ~want
                self._words.want(self._wants)

    def begin(self, step: int) -> None:
        """Begin a round, on every rank after the same step: before a loop, after an action or a rollback."""
        self._enter(self._round + 1 + self._round % 2, step)
        if self._wants:
            self._reporter.nudge()

    def close(self) -> None:
        """End the loop: this rank completes no more steps, and stands in nobody's way."""
        if self._round % 2:
            self._enter(self._round + 1, 0)

    def end(self) -> None:
        """End the session: nothing is asked for any more."""
        self.close()
        self._reporter.close()

    def _enter(self, round_: int, step: int) -> None:
        self._round = round_
        self._part.begin(round_)
        self._words.begin(round_, step)

    def decided(self, step: int) -> Proposal | None:
        """Return what all ranks do after this step; None: nothing. Waits only for a decision under way.

        Raises:
            ExchangeFailed: the decision did not come.
        """
        if self._words.ticket == self._ticket and self._part.move(step) is Move.GO_ON:
            self._words.go_on(step)
            return None
        return self._decide(step)

    def _decide(self, step: int) -> Proposal | None:
        pause, waits_since, beat_at = _FIRST_PAUSE, 0.0, 0.0
        while True:
            self._hear(step)
            if self._part.move(step) is not Move.WAIT:
                break
            now = time.monotonic()
            waits_since = waits_since or now
            if now > waits_since + _PATIENCE:
                raise ExchangeFailed(
                    f"the agreement on step {step}: the agent has not decided in {_PATIENCE:.0f} s; this rank"
                    " ends"
                )
            if now > beat_at + _BEAT_EVERY:
                beat_at = now
                self._page.repeat()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if waits_since:
            self._page.touch()  # the wait teaches no timeout
        found = self._part.committed
        if found is None or found.step != step:
            self._words.go_on(step)
            return None
        self.take_back(found.wants)
        return found

    def _hear(self, step: int) -> None:
        said = self._words.read() if self._words.ticket != self._ticket else None
        if said is None:
            return
        self._ticket = said.ticket
        for answer in self._part.hear(said, step):
            self._answer(answer)

    def _answer(self, answer: Answer) -> None:
        with self._at_wants:
            self._words.terms(*self._terms())
        self._words.answer(answer.number, answer.passed)
        self._reporter.nudge()
