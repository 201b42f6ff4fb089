"""Chats as text: how they are written, and which characters are the assistant's own words.

A folder's own template is rendered by `transformers`. Of each answer the words are what the chat up to it adds to the
chat before it with the assistant's turn begun; so the token that ends the turn counts as well. A template that writes
earlier turns in another way once later ones are there says nothing of its words, and is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from unisono.train.data.tokenised.cutters import Folder

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
ASSISTANT = "assistant"
Message = Mapping[str, Any]
Write = Callable[
    [Sequence[Message], bool], str
]  # messages, whether the assistant's turn is begun behind them


class BadRecord(ValueError):
    """A record that cannot be read; its text says why."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text, and where in it stand the words that count: (first, end) in characters; None: all of it. closed: it
    begins and ends as a template wants it, so nothing is put around it."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    closed: bool = False


def messages_of(given: Any) -> list[Message]:
    """Checked messages, with a role and content each; those of other spellings in ours. Raises BadRecord."""
    if not isinstance(given, list) or not given:
        raise BadRecord("its messages are no list, or an empty one")
    return [_message(i, one) for i, one in enumerate(given)]


def _message(at: int, one: Any) -> Message:
    if not isinstance(one, Mapping):
        raise BadRecord(f"message {at + 1} is no object with role and content")
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    if not isinstance(role, str) or not role:
        raise BadRecord(f"message {at + 1} has no role")
    if not isinstance(content, str) and not (content is None and one.get("tool_calls")):
        raise BadRecord(f"the content of message {at + 1} is no text")
    rest = {key: value for key, value in one.items() if key not in ("from", "value")}
    return {**rest, "role": _ROLES.get(role, role), "content": content}


def plain(messages: Sequence[Message], begun: bool) -> str:
    """A line a message, `role: content`, for tokenizers that bring no template."""
    lines = "".join(f"{one['role']}: {one['content'] or ''}\n" for one in messages)
    return lines + f"{ASSISTANT}: " if begun else lines


def template_of(folder: Folder) -> Write:
    """The folder's own template."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(folder.folder), local_files_only=True)

    def write(messages: Sequence[Message], begun: bool) -> str:
        try:
            return made.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begun)
        except Exception as error:  # a template may refuse in any way that it likes
            raise BadRecord(f"the chat template refuses it: {error}") from error

    return write


def written(messages: Sequence[Message], write: Write, first: int = 0) -> Wording:
    """The chat, and the words of those of its assistant's messages that are not before message `first`. Raises
    BadRecord."""
    turns = [i for i, one in enumerate(messages) if one["role"] == ASSISTANT and i >= first]
    if not turns:
        raise BadRecord(f"no message of it is by the {ASSISTANT}, so it has nothing to learn")
    text, spans = write(messages, False), []
    for i in turns:
        after = write(messages[: i + 1], False)
        before = write(messages[:i], True) if i else ""
        if not after.startswith(
            before
        ):  # what begins a turn may be more than any turn has, such as a thought
            before = write(messages[:i], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise BadRecord(
                "the template writes earlier turns in another way once later ones follow, so it does not say which"
                " words are the assistant's: data.answers_only = false, or one answer a record"
            )
        spans.append((len(before), len(after)))
    return Wording(text, tuple(spans), write is not plain)


def counted(starts: Sequence[int], answers: Sequence[tuple[int, int]]) -> bytearray:
    """Of tokens that begin at these characters, ascending: 1 where a token belongs to an answer."""
    marks, at = bytearray(len(starts)), 0
    for (first, end), following in pairwise([*answers, (1 << 62, 1 << 62)]):
        while at < len(starts) and starts[at] < following[0]:
            marks[at] = first <= starts[at] < end
            at += 1
    return marks
