"""Carrying out the lines of a story, one at a time."""

from collections.abc import Callable
from typing import assert_never

from attrs import define

from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import RequestError
from kvlift.runtime.tick import Granted, Growth, NoRoom, Pending
from kvlift.testing.sim_memory import Mode, SimMemory
from kvlift.testing.story_check import shortfall
from kvlift.testing.story_host import HostRequest
from kvlift.testing.story_lines import (
    Advance,
    ConfigLine,
    Expect,
    Finish,
    Flush,
    Grow,
    Landing,
    Line,
    PeerSays,
    Place,
    Port,
    PortsLine,
    PromptLine,
    Restart,
    Scheduler,
    Statement,
    Storage,
    Submit,
    Tick,
    Weather,
    Wedge,
    World,
)
from kvlift.testing.story_place import place, wedge
from kvlift.testing.story_stage import PEER, Stage, StoryFailedError
from kvlift.testing.story_words import StoryError


@define
class Player:
    """Carries out one line at a time."""

    stage: Stage

    def play(self, line: Line) -> None:
        if self.stage.trace is not None:
            self.stage.trace(f"{line.number}: {line.text}")
        self._play(line.statement, line)

    def _play(self, statement: Statement, line: Line) -> None:
        match statement:
            case World():
                pass
            case Expect():
                self._expect(statement, line)
            case Tick(n_ticks=n_ticks, rank=rank):
                self._tick(n_ticks, rank)
            case Advance(by_ns=by_ns, rank=rank):
                for number, one in enumerate(self.stage.ranks):
                    if rank is None or rank == number:
                        one.clock.advance(by_ns)
            case Submit() | Scheduler() | Grow() | Finish():
                self._schedule(statement)
            case Landing() | Weather() | PeerSays() | PortsLine():
                self._weather(statement)
            case ConfigLine() | PromptLine():
                self._define(statement, line.number)
            case Place() | Wedge() | Flush() | Storage() | Restart():
                self._arrange(statement)
            case _:
                assert_never(statement)

    def _expect(self, expect: Expect, line: Line) -> None:
        n_left = expect.within_ticks or 0
        found = shortfall(self.stage, expect.expectation)
        while found is not None and n_left > 0:
            self.stage.tick()
            n_left -= 1
            found = shortfall(self.stage, expect.expectation)
        if found is not None:
            raise StoryFailedError(f"expected {line.text.removeprefix('expect ')}, found {found}")

    def _tick(self, n_ticks: int, rank: int | None) -> None:
        if rank is not None:
            self.stage.enter(rank)
            return
        for _ in range(n_ticks):
            self.stage.tick()

    def _schedule(self, statement: Submit | Scheduler | Grow | Finish) -> None:
        match statement:
            case Submit():
                self._submit(statement)
            case Scheduler(verb="abort", name=name):
                self._on_all("abort", name, lambda driver: driver.abort(name))
                self._request(name).leave_all()
            case Scheduler(verb="run", name=name):
                self._on_all("run", name, lambda driver: driver.run(name))
            case Scheduler(verb="retract", name=name):
                self._retract(name)
            case Scheduler(name=name):
                self._on_all("resume", name, lambda driver: driver.resume(name))
            case Grow(name=name, n_pages=n_pages):
                self._grow(name, n_pages)
            case Finish():
                self._finish(statement)
            case _:
                assert_never(statement)

    def _request(self, name: str) -> HostRequest:
        request = self.stage.requests.by_name.get(name)
        if request is None:
            raise StoryFailedError(f"expected {name} to be submitted, found no submission of it")
        return request

    def _on_all(self, verb: str, name: str, call: Callable[[Driver], object]) -> None:
        """The same call on every rank; a refusal is a failure of the story."""
        refusals = self._refusals(call)
        if refusals:
            raise StoryFailedError(f"expected to {verb} {name}, found a refusal: {refusals[0]}")

    def _refusals(self, call: Callable[[Driver], object]) -> list[str]:
        refusals = []
        for driver in self.stage.started():
            try:
                call(driver)
            except RequestError as refused:
                refusals.append(str(refused))
        if refusals and len(refusals) < len(self.stage.ranks):
            raise StoryFailedError(f"expected equal answers, found one rank alone: {refusals[0]}")
        return refusals

    def _submit(self, line: Submit) -> None:
        prompt = self.stage.prompts.by_name[line.name]
        refusals = self._refusals(
            lambda driver: driver.submit(
                line.name,
                prompt.prompt,
                peer=PEER,
                priority=line.priority,
                n_pages_output=line.n_output_pages,
            )
        )
        request = self.stage.requests.by_name.get(line.name)
        if refusals and request is not None and request.outcome is None:
            request.refusals += refusals
            return
        made = self.stage.requests.open(prompt)
        for dock in self.stage.harbour.docks:
            dock.mark(line.name)
        if refusals:
            made.outcome, made.reason = "failed", refusals[0]

    def _retract(self, name: str) -> None:
        request = self._request(name)
        request.decode_to(request.n_sampled_in_table(), self._memories())
        output = request.output()
        self._on_all("retract", name, lambda driver: driver.retract(name, output))
        request.leave_all()

    def _finish(self, line: Finish) -> None:
        request = self._request(line.name)
        n_sampled = request.n_sampled_for(line.n_output_pages)
        n_missing = request.n_pages_missing(n_sampled)
        if n_missing:
            self._grow(line.name, n_missing)
            if request.grow_outcome != "granted":
                raise StoryFailedError(
                    f"expected pages for {line.n_output_pages} pages of output,"
                    f" found {n_missing} too few and the growth {request.grow_outcome}"
                )
        request.decode_to(n_sampled, self._memories())
        output = request.output()
        self._on_all("finish", line.name, lambda driver: driver.finish(line.name, output))
        request.leave_all()

    def _grow(self, name: str, n_pages: int) -> None:
        request = self._request(name)
        answers: list[Growth] = []
        self._on_all("grow", name, lambda driver: answers.append(driver.grow(name, n_pages)))
        if len({type(answer) for answer in answers}) > 1:
            raise StoryFailedError(f"expected one answer of all ranks, found {answers}")
        for rank, answer in enumerate(answers):
            match answer:
                case Granted(device_pages=pages):
                    request.grow_outcome = "granted"
                    request.tables[rank] += tuple(pages)
                case NoRoom():
                    request.grow_outcome = "refused"
                case Pending():
                    request.grow_outcome = "pending"
        request.n_grown += n_pages if request.grow_outcome == "granted" else 0
        self.stage.look()

    def _memories(self) -> list[SimMemory]:
        return [rank.memory for rank in self.stage.ranks]

    def _weather(self, statement: Landing | Weather | PeerSays | PortsLine) -> None:
        match statement:
            case Landing(name=name):
                prompt = None if name is None else self.stage.prompts.by_name[name]
                self.stage.harbour.carry_out(statement, prompt)
            case PortsLine(mode=mode, ports=ports):
                self.stage.set_ports(ports, Mode(mode))
            case PeerSays():
                self._peer_says(statement)
            case Weather(verb="silence", port=Port.STORE):
                for rank in self.stage.ranks:
                    rank.store.is_silent = True
            case Weather(verb="silence"):
                self.stage.node.is_silent = True
            case Weather(verb="kill"):
                self.stage.node.is_alive = False
                for rank in self.stage.ranks:
                    rank.peers.lose_node(self.stage.node)
            case Weather():
                self.stage.node.revive()
            case _:
                assert_never(statement)

    def _peer_says(self, line: PeerSays) -> None:
        node = self.stage.node
        for number, rank in enumerate(self.stage.ranks):
            if line.rank is not None and line.rank != number:
                continue
            talks = [talk for _node, talk in rank.peers.open_talks() if talk.rid == line.name]
            match line.verb:
                case "ack":
                    for talk in talks:
                        rank.peers.acknowledge(talk)
                case "reject":
                    node.refuse(line.name, line.reason, talks)
                case "expire":
                    node.expire(line.name, talks)

    def _define(self, statement: ConfigLine | PromptLine, number: int) -> None:
        try:
            match statement:
                case ConfigLine(fields=fields):
                    self.stage.configure(fields)
                case PromptLine():
                    self.stage.prompts.add(statement)
                case _:
                    assert_never(statement)
        except ValueError as error:
            raise StoryError(number, str(error)) from error

    def _arrange(self, statement: Place | Wedge | Flush | Storage | Restart) -> None:
        match statement:
            case Place():
                place(self.stage, statement)
            case Wedge():
                wedge(self.stage, statement)
            case Flush(tiers=tiers):
                for driver in self.stage.started():
                    driver.flush(tiers)
            case Storage(verb=verb):
                for driver in self.stage.started():
                    driver.detach_storage() if verb == "detach" else driver.attach_storage()
            case Restart():
                self.stage.restart()
            case _:
                assert_never(statement)
