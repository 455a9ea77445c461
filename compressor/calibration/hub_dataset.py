"""Data sets of the Hugging Face Hub, streamed: nothing is downloaded but what is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.calibration.documents import Row, columns_to_read, document_of_row
from compressor.errors import CompressorError, RequestError, RunError

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, slots=True)
class HubDatasetReader:
    """The rows of one split of a Hub data set.

    Raises, while it is iterated:
        RequestError: the data set, its config or its split cannot be had; the reason and the remedy are named.
        RunError: the stream broke off after its first row.
    """

    name: str
    config: str | None
    split: str
    column: str

    def rows(self) -> Iterator[Row]:
        # Imported here: it takes half a second, and only a Hub id needs it.
        from datasets.exceptions import DatasetsError

        number = 0
        try:
            for number, row in enumerate(self._stream(), start=1):  # noqa: B007 - the handler below reads it
                yield row
        except (DatasetsError, OSError, ValueError, RuntimeError, _http_error()) as error:
            raise self._explained(error, number) from error

    def _stream(self) -> Iterator[Row]:
        import datasets

        stream: datasets.IterableDataset = datasets.load_dataset(
            self.name, self.config, split=self.split, streaming=True
        )
        known: list[str] | None = stream.column_names
        columns = columns_to_read(known or (), self.column)
        if columns:
            stream = stream.select_columns(list(columns))
        for number, row in enumerate(stream, start=1):
            yield Row(f"row {number}", document_of_row(row, self.column), known or tuple(row))

    def _explained(self, error: Exception, rows_read: int) -> CompressorError:
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        reason = " ".join(str(error).split()).rstrip(".")
        named = f'the Hub data set "{self.name}"'
        if rows_read:
            return RunError(f"{named} broke off after row {rows_read:,} ({reason}); run again, or use a local file.")
        # `datasets` wraps the Hub's error and drops it as the cause: the text is all that is left of it.
        if isinstance(error, GatedRepoError) or "gated dataset" in reason:
            return RequestError(
                f"{named} is gated: accept its licence at https://huggingface.co/datasets/{self.name} "
                "and log in with `hf auth login`."
            )
        if isinstance(error, DatasetNotFoundError | RepositoryNotFoundError):
            return RequestError(
                f'no file or folder "{self.name}" exists, and no Hub data set of that name that you may read; '
                "check the name, or log in with `hf auth login`."
            )
        if isinstance(error, (ConnectionError, _http_error())):
            return RequestError(
                f'"{self.name}" is no local file or folder, and the Hub data set of that name cannot be reached '
                f'({reason}); go online with HF_HUB_OFFLINE unset, or use a local file or "demo".'
            )
        return RequestError(
            f'{named} cannot be streamed with config "{self.config or "default"}" and split "{self.split}" '
            f"({reason}); choose another config, split or source."
        )


def _http_error() -> type[Exception]:
    # Which package has this class changed between versions of huggingface_hub; this name of it stayed.
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    error: type[Exception] = httpx.HTTPError
    return error
