"""A model repository on a hub: its pinned commit, its files with sizes and hashes, and its refusals in words.

Uses huggingface_hub for names, revisions, tokens and metadata, and nothing of its downloading. Knows no
tensors and no disks. Invariant: every file of a `Listing` is addressed by commit id, so what is fetched later
is what was listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from huggingface_hub import HfApi, ModelInfo, constants, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from swiftlet_mlx.errors import (
    AccessDenied,
    NetworkFailed,
    OptionError,
    SourceBroken,
    SourceChanged,
    SourceNotFound,
    SwiftletError,
)
from swiftlet_mlx.qpack import safe_relative

from .answers import BUSY
from .fetch import Fetcher
from .origin import RemoteFile
from .patience import TryAgain, retry_after

LIBRARY = "swiftlet-mlx"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds, pinned: its name for people and for the journal, its commit if it has one, its
    files."""

    source: str
    commit: str | None
    files: Mapping[str, RemoteFile]


class Hub:
    """One repository on a hub, as an origin of files.

    Args:
        repo: `ORG/NAME`, in any letter case the hub accepts.
        revision: branch, tag or commit; None is the hub's default.
        endpoint: None is HF_ENDPOINT or the public hub, as huggingface_hub sees it.
        token: None is HF_TOKEN or the one saved by `hf auth login`, as huggingface_hub sees it.
    """

    def __init__(
        self, repo: str, *, revision: str | None = None, endpoint: str | None = None, token: str | None = None
    ) -> None:
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
            raise OptionError(f"{repo!r} is not the name of a hub repository; it has the form ORG/NAME")
        self.repo, self.revision = repo, revision
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token

    @property
    def name(self) -> str:
        return self.repo

    @property
    def home(self) -> str:
        return self.endpoint

    def credentials(self) -> Mapping[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self._token, library_name=LIBRARY)
        return headers

    def listing(self, fetcher: Fetcher, *, commit: str | None = None) -> Listing:
        """The files of the pinned commit.

        Args:
            commit: an earlier pin to stay with, whatever the revision points to now.

        Raises:
            SourceNotFound, AccessDenied, SourceChanged, NetworkFailed, SourceBroken: each with what to do.
        """
        info = fetcher.retrying(self.repo, lambda: self._info(commit or self.revision, pinned=commit is not None))
        if info.sha is None or not re.fullmatch(r"[0-9a-f]{40}", info.sha):
            raise SourceBroken(f"{self.repo}: {self.endpoint} does not say which commit it serves")
        self.repo = info.id  # in the hub's own letter case
        files = {}
        for sibling in info.siblings or []:
            safe_relative(sibling.rfilename, self.repo)
            if sibling.size is None:
                raise SourceBroken(f"{self.repo}: {self.endpoint} gives no size for {sibling.rfilename}")
            if not sibling.lfs and not sibling.blob_id:
                raise SourceBroken(
                    f"{self.repo}: {self.endpoint} gives no hash for {sibling.rfilename}, so nothing could be "
                    "verified. Set HF_ENDPOINT to a hub that does"
                )
            files[sibling.rfilename] = RemoteFile(
                sibling.rfilename,
                hf_hub_url(self.repo, sibling.rfilename, revision=info.sha, endpoint=self.endpoint),
                sibling.size,
                sha256=sibling.lfs.sha256 if sibling.lfs else None,
                git_oid=sibling.blob_id if not sibling.lfs else None,
            )
        return Listing(self.repo, info.sha, files)

    def refusal(self, status: int, headers: Mapping[str, str], file: str) -> SwiftletError:
        code = headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return self._gated()
        if status == 404 or code in ("EntryNotFound", "RevisionNotFound"):
            return SourceNotFound(f"{file}: {self.repo} has no such file (any more); the repository is incomplete")
        if status in (401, 403):
            said = headers.get("X-Error-Message", f"status {status}")
            return AccessDenied(f"{file}: {self.repo} may not be read ({said}). {self._log_in()}")
        return NetworkFailed(f"{file}: {self.endpoint} answered with status {status}; try again later")

    def _info(self, revision: str | None, *, pinned: bool) -> ModelInfo:
        api = HfApi(endpoint=self.endpoint, token=self._token, library_name=LIBRARY)
        try:
            return api.model_info(self.repo, revision=revision, files_metadata=True, timeout=30)
        except GatedRepoError:
            raise self._gated() from None
        except RepositoryNotFoundError as error:
            raise self._missing(api, error) from None
        except RevisionNotFoundError:
            if pinned:
                raise SourceChanged(
                    f"{self.repo}: commit {revision} was being installed and is gone from the hub. Repeat "
                    "the command with --restart to install what is there now"
                ) from None
            raise SourceNotFound(
                f"{self.repo} has no revision {revision!r}; see {self.endpoint}/{self.repo}/tree/main"
            ) from None
        except DisabledRepoError:
            raise AccessDenied(f"{self.repo} was disabled by the hub and cannot be read") from None
        except HFValidationError as error:
            raise OptionError(f"{self.repo!r} is not the name of a hub repository: {error}") from None
        except OfflineModeIsEnabled:
            raise NetworkFailed(
                f"HF_HUB_OFFLINE is set, so {self.repo} cannot be fetched. Unset it, or give a model that is "
                "already here (see `swiftlet-mlx list`)"
            ) from None
        except HfHubHTTPError as error:
            raise self._http(error) from None
        except (httpx2.ProxyError, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            raise NetworkFailed(
                f"{self.endpoint} cannot be asked: {error}. Check HF_ENDPOINT, HTTPS_PROXY and NO_PROXY"
            ) from None
        except httpx2.HTTPError as error:
            raise TryAgain(f"{self.endpoint} cannot be reached ({type(error).__name__}: {error})") from None
        except (ValueError, KeyError, TypeError) as error:
            page = SourceBroken(
                f"{self.repo}: {self.endpoint} answers with something that is not a hub's answer ({error}). "
                "Check HF_ENDPOINT; a network that wants a login also does this"
            )
            raise TryAgain("the hub's answer makes no sense", wrong=page) from None

    def _http(self, error: HfHubHTTPError) -> Exception:
        status, headers = error.response.status_code, error.response.headers
        if status in BUSY:
            return TryAgain(f"{self.endpoint} answered {status}", retry_after=retry_after(headers))
        if status == 401:
            return AccessDenied(f"{self.endpoint} does not accept the token. {self._log_in()}")
        return self.refusal(status, headers, self.repo)

    def _missing(self, api: HfApi, error: RepositoryNotFoundError) -> SwiftletError:
        spelled = self._spelled(api)
        if spelled:
            return SourceNotFound(f"{self.repo}: there is no such model on {self.endpoint}; did you mean {spelled}?")
        trusted = "authorization" in self.credentials()
        hint = "this token may not see it" if trusted else f"it is private. If it is, {self._log_in(lower=True)}"
        return SourceNotFound(f"{self.repo}: there is no such model on {self.endpoint}, or {hint}")

    def _spelled(self, api: HfApi) -> str | None:
        """The same name in another letter case, if the hub's search finds one."""
        try:
            found: list[Any] = list(api.list_models(search=self.repo.split("/")[1], limit=50))
        except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError):
            return None
        wanted = self.repo.casefold()
        return next((str(m.id) for m in found if m.id.casefold() == wanted and m.id != self.repo), None)

    def _gated(self) -> AccessDenied:
        return AccessDenied(
            f"{self.repo} is gated: ask for access at {self.endpoint}/{self.repo}, then {self._log_in(lower=True)}"
        )

    @staticmethod
    def _log_in(*, lower: bool = False) -> str:
        text = "Run `hf auth login` or set HF_TOKEN, and repeat the same command"
        return text[0].lower() + text[1:] if lower else text
