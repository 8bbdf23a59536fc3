"""The API server of a rehearsal lets in whom it knows, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import MaxRetryError

from rehearsal.kubernetes.control_plane import CONTEXT, LocalControlPlane


def api(kubeconfig: Path) -> Any:
    return config.new_client_from_config(str(kubeconfig), context=CONTEXT)


def test_nobody_without_a_certificate_may_do_anything_and_nothing_is_left(
    control_plane: LocalControlPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "second"
    with LocalControlPlane(folder=folder, programs=control_plane.programs) as second:
        with api(control_plane.kubeconfig) as connection:
            connection.configuration.host = second.layout.server
            with pytest.raises(MaxRetryError, match="CERTIFICATE_VERIFY_FAILED"):
                client.CoreV1Api(connection).list_namespace(_request_timeout=5)
        second.authority.kubeconfig(folder / "nobody", second.layout.server, "nobody", context=CONTEXT)
        with api(folder / "nobody") as connection, pytest.raises(ApiException) as refused:
            client.CoreV1Api(connection).list_namespace()
        assert refused.value.status == 403
        processes = list(second.running.values())
    assert len(processes) == 2 and None not in [process.poll() for process in processes]
    assert not folder.exists()
