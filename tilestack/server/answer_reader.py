"""What an answer in a conversation holds: thoughts, text, and calls of functions."""

from tilestack.server.reasoning import ThoughtReader
from tilestack.server.sampling import must_call
from tilestack.server.schemas import ChatRequest
from tilestack.server.tools import CallReader, Found, WholeCall


def answer_reader(request: ChatRequest, thinking: bool | None) -> "AnswerReader | None":
    """What finds thoughts and calls in an answer, where there may be any; `thinking` says whether the answer begins within
    thoughts, and None that thoughts are not told from text."""
    thoughts = None if thinking is None else ThoughtReader(begun=thinking)
    if not request.offered_tools:
        return AnswerReader(thoughts, None) if thoughts else None
    if must_call(request):
        return AnswerReader(None, WholeCall())
    return AnswerReader(thoughts, CallReader(most=1 if request.parallel_tool_calls is False else None))


class AnswerReader:
    """Splits one answer, piece by piece, into thoughts, text and calls."""

    def __init__(self, thoughts: ThoughtReader | None, calls: CallReader | WholeCall | None):
        self.thoughts, self.calls = thoughts, calls

    def feed(self, piece: str, last: bool) -> Found:
        """What is certain after this piece; after the last, all."""
        thought = ""
        if self.thoughts:
            thought, piece = self.thoughts.feed(piece)
            if last:
                thought, piece = (had + more for had, more in zip((thought, piece), self.thoughts.end(), strict=True))
        found = self.calls.feed(piece) if self.calls else Found([piece] if piece else [])
        if self.calls and last:
            found.parts += self.calls.end().parts
        found.thoughts = thought
        return found
