"""How many drafts of one request are worth verifying, learned from its recent steps."""

FIRST_LENGTH = 4
MAX_MISSES = 3
FIRST_REST = 8
LONGEST_REST = 256
GROWTH = 2  # of rests
NEVER_RIGHT_GROWTH = 4


class DraftLength:
    """The number of drafts of one request, between 0 and a maximum.

    It doubles when all drafts are accepted, and otherwise falls towards one more than were accepted. After a few
    consecutive steps that accept nothing it is zero for a rest; then one draft is tried. If that fails, the next rest
    doubles, or quadruples until a draft of the request has been right; steps that accept a draft shorten it again.
    Drafts that are never right thus cost a handful at first, then one in `LONGEST_REST` steps.
    """

    def __init__(self, max_drafts: int) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts must be at least 1, found {max_drafts}")
        self._max_drafts = max_drafts
        self._length = min(FIRST_LENGTH, max_drafts)
        self._num_misses = 0  # steps in a row that accepted none of their drafts
        self._rest = FIRST_REST  # steps of the next rest
        self._rest_left = 0
        self._growth = NEVER_RIGHT_GROWTH

    @property
    def rests(self) -> bool:
        """True when the step after one without drafts should have none either."""
        return self._rest_left > 1

    def wanted(self, limit: int) -> int:
        """Return how many drafts the next step should try, 0 to `limit`; changes nothing."""
        return 0 if self._rest_left else max(0, min(self._length, limit))

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step of the request, called once for each, with or without drafts.

        Args:
            num_drafted: Drafts that were verified.
            num_accepted: How many of them were accepted; the base token does not count.

        Raises:
            ValueError: If more were accepted than drafted, or a number is negative.
        """
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"need 0 <= num_accepted <= num_drafted, found {num_accepted} of {num_drafted}")
        if num_drafted == 0:
            self._rest_left = max(0, self._rest_left - 1)
        elif num_accepted == 0:
            self._note_miss()
        else:
            self._note_hit(num_drafted, num_accepted)

    def _note_hit(self, num_drafted: int, num_accepted: int) -> None:
        if num_accepted == num_drafted:
            self._length = min(self._max_drafts, max(self._length, 2 * num_drafted))
        else:
            self._length = max(num_accepted + 1, (self._length + num_accepted) // 2)
        self._num_misses = 0
        self._growth = GROWTH
        self._rest = max(FIRST_REST, self._rest // 2)

    def _note_miss(self) -> None:
        self._num_misses += 1
        self._length = max(1, self._length // 2)
        if self._num_misses >= MAX_MISSES:
            self._num_misses = MAX_MISSES - 1  # the draft on trial after the rest has one chance
            self._length = 1
            self._rest_left = self._rest
            self._rest = min(LONGEST_REST, self._growth * self._rest)
