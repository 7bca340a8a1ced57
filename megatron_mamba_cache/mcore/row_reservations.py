"""The boundaries of a context's prefill rows, as the slot allocator reads them."""

from .step_reader import StepReader


class RowReservations:
    """The boundaries that the scheduler reserved for the step in preparation."""

    def __init__(self, context: StepReader) -> None:
        self._context = context

    def offsets(self) -> list[list[int]]:
        """Return, for each prefill row, its boundaries relative to the row's first token of this step."""
        prefilling = [row for row in self._context.rows if row.is_prefilling and row.scheduled]
        return [[state.position - row.computed for state in row.reserved] for row in prefilling]

    def commit(self) -> None:
        """Publish what the step wrote for prompts."""
        step = self._context.step.batch
        for row in step.rows[step.num_decode_rows :]:
            self._context.cache.publish(row, row.scheduled)
