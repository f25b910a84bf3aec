"""The requests of a run as the prompts of a story: who shares whose pages, in which namespace.

A story's prompts are streams of their own making. What matters to the cache is kept: which full
pages two prompts have in common, answers included, and which namespaces are different.
"""

from attrs import define, field

from kvlift.core.prompt import Prompt
from kvlift.core.submission import Finish, Retract, Submission, Submit
from kvlift.testing.sim.scribe import Scribe


class CannotBeTold(Exception):
    """A sentence: what of this run no story can say."""


@define
class Actor:
    """A request: its prompt, and the longest answer that was seen of it."""

    rid: str
    prompt: Prompt
    answer: bytes = b""

    @property
    def text(self) -> bytes:
        return self.prompt.tokens + self.answer

    def n_pages_shared(self, other: "Actor") -> int:
        """Full pages from the beginning on that are equal, whoever may see them."""
        size = 4 * self.prompt.page_tokens
        n_most = min(len(self.text), len(other.text)) // size
        low = 0
        while low < n_most and (
            self.text[low * size : (low + 1) * size] == other.text[low * size : (low + 1) * size]
        ):
            low += 1
        return low


@define(eq=False)
class Cast:
    """`lines`: a `prompt` line for every request, in the order of their first submission."""

    actors: dict[str, Actor] = field(factory=dict)
    lines: list[str] = field(factory=list)
    _tenants: dict[bytes, str] = field(factory=dict)

    @classmethod
    def of(cls, scribe: Scribe) -> "Cast":
        """Raises `CannotBeTold`."""
        made = cls()
        for entry in scribe.entries:
            for call in entry.calls:
                made._note(call)
        told: list[Actor] = []
        for actor in made.actors.values():
            made.lines += made._lines(actor, told)
            told.append(actor)
        return made

    def _note(self, call: Submission) -> None:
        match call:
            case Submit(rid=rid, prompt=prompt):
                known = self.actors.setdefault(rid, Actor(rid, prompt))
                if known.prompt != prompt:
                    raise CannotBeTold(f"{rid} was submitted with two different prompts")
                self._tenants.setdefault(prompt.namespace, f"t{len(self._tenants)}")
            case Finish(rid=rid, output=output) | Retract(rid=rid, output=output):
                actor = self.actors[rid]
                actor.answer = max(actor.answer, output, key=len)
            case _:
                pass

    def _lines(self, actor: Actor, told: list[Actor]) -> list[str]:
        prompt, page = actor.prompt, actor.prompt.page_tokens
        size = f"pages={prompt.n_pages_full}"
        if prompt.n_tokens % page:
            size += f" tokens={prompt.n_tokens}"
        tenant = f" tenant={self._tenants[prompt.namespace]}"
        parent, n_shared = None, 0
        for other in told:
            n_pages = actor.n_pages_shared(other)
            if n_pages > n_shared:
                parent, n_shared = other, n_pages
        if parent is None:
            return [f"prompt {actor.rid} {size}{tenant}"]
        begins = f"from={parent.rid}[0:{n_shared}]"
        if n_shared * page < prompt.n_tokens:
            return [f"prompt {actor.rid} {begins} {size}{tenant}"]
        # All of it is the other's, and what follows is not: a stream of its own begins behind it.
        whole = n_shared * page + 1
        n_pages = whole // page
        return [
            f"prompt {actor.rid}-all {begins} pages={n_pages} tokens={whole}{tenant}",
            f"prompt {actor.rid} like={actor.rid}-all {size}",
        ]
