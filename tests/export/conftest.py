from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.export.hub_upload_server import TOKEN, UploadHub, taking_uploads


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UploadHub]:
    """A Hub that the client of this process uses, with a token that it takes."""
    with taking_uploads(UploadHub(TOKEN)) as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served
