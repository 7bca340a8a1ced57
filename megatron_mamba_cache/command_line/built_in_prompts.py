"""Prompts for a run without a file: sessions and single questions about one document."""

from .prompts import PromptLine

_DOCUMENT = """\
You answer questions about the following notice. Quote it where you can, and say so if it has no answer.

Harbour notice 14. The swing bridge at Mill Quay opens on request between 06:00 and 21:30. Boats shorter than nine
metres pass under the closed span at any state of the tide; longer ones call the keeper on channel 12 at least twenty
minutes ahead. No boat passes while the red lamp on the east pier is lit, whatever the keeper has said before.
Visitors berth on the north pontoon and pay at the office within an hour of arriving; the first night is free for
crews that bring news of a light or buoy out of order. Fresh water is laid on at every second berth. Nets are mended on
the slip only, and never across the rails of the lifeboat. When the bell rings three times, everybody who can hold a
rope comes to the slip.
"""
_SESSIONS = {
    "skipper": (
        "\nQuestion: May a boat of eleven metres pass at noon?\n",
        "Answer: Yes, if it calls the keeper on channel 12 twenty minutes ahead.\n"
        "Question: And if the red lamp is lit?\n",
        "Answer: Then no boat passes.\nQuestion: Where does it wait?\n",
    ),
    "visitor": (
        "\nQuestion: Where do I berth for the night, and what does it cost?\n",
        "Answer: On the north pontoon; the notice names no price.\nQuestion: How do I get the first night free?\n",
        "Answer: Bring news of a light or buoy out of order.\nQuestion: Is there water at every berth?\n",
    ),
    "fisher": (
        "\nQuestion: May I mend my nets on the pontoon?\n",
        "Answer: No, on the slip only, clear of the rails of the lifeboat.\n"
        "Question: What do three strokes of the bell mean?\n",
    ),
}
_SINGLE_QUESTIONS = (
    "\nQuestion: Which channel does the keeper listen to?\n",
    "\nQuestion: When does the bridge open in the morning?\n",
    "\nQuestion: Is there a shop on the quay?\n",
    "\nQuestion: When does the bridge open in the morning?\n",
)


def built_in_lines() -> list[PromptLine]:
    """Return the sessions' turns, each prompt complete with the turns before it, and single questions."""
    turns: list[tuple[str, str | None]] = []
    for session, questions in _SESSIONS.items():
        prompt = _DOCUMENT
        for question in questions:
            prompt += question
            turns.append((prompt, session))
    turns += [(_DOCUMENT + question, None) for question in _SINGLE_QUESTIONS]
    return [PromptLine(number, prompt, session=session) for number, (prompt, session) in enumerate(turns)]
