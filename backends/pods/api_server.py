"""A cluster's API: requests, watches, programs in pods, ports of pods.

Requests go through the official client, by paths and plain objects: its typed models would be a second form of what
`backends.pods.manifests` builds and tests compare."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from backends.pods.pods import Object
from contracts import atomic
from contracts.errors import RequestError, message_line
from contracts.inventory import Cluster
from jobs.runtime.storage.cache import user_cache_dir
from launch.hosts import HostError, in_thread

CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 15.0
WATCH_S = 240
"""After which a watch is taken up anew where it was."""
WATCH_SILENCE_S = 90.0
"""The API server sends a bookmark about every minute."""
WATCH_PAUSE_S = 1.0
FIRST_LOOK_S = 20.0
REMEMBERED = 256
"""How many objects that are gone a watch still knows."""
ASK_AGAIN_S = 1.0
MOST_CONNECTIONS = 8
FORBIDDEN, NOT_FOUND, CONFLICT, TOO_OLD, TOO_MANY = 403, 404, 409, 410, 429
MERGE = "application/merge-patch+json"
_LOADING = threading.Lock()
"""The client writes keys into files of its own, and has named one to a second thread before it was written."""
SYSTEM_CAS = (ssl.get_default_verify_paths().openssl_cafile, "/etc/ssl/certs/ca-certificates.crt")
GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@dataclasses.dataclass(kw_only=True, eq=False)
class ApiError(HostError):
    """What the API server refused, or why it cannot be asked. status: of HTTP; None: it gave no answer."""

    status: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether the same question would be answered the same later: what it refuses, and not that it is away."""
        return self.status is not None and self.status < 500 and self.status != TOO_MANY


def patiently[T](
    ask: Callable[[], T], *, limit_s: float, tell: Callable[[str], object] = lambda _: None
) -> T:
    """Return what `ask` does. While the API server is away, as in an upgrade, it is asked again.

    Raises:
        ApiError: it refuses, or is away for longer than `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    while True:
        try:
            return ask()
        except ApiError as error:
            if error.is_final or time.monotonic() > until_s:
                raise
            tell(f"{error}; it is asked again")
        time.sleep(ASK_AGAIN_S)


Right = tuple[str, str, str]
"""API group, resource or resource/part, verb."""


def may(ask: Callable[[str, str, Object | None], Mapping[str, Any]], namespace: str, right: Right) -> bool:
    """Return whether this user has a right in a namespace. An API server need not know all that its authorizers would
    allow, so each is asked for by itself. ask: of a `Connection`."""
    group, resource_path, verb = right
    resource, _, part = resource_path.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": part,
    }
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    return bool(
        ask("POST", path, {**review, "spec": {"resourceAttributes": attributes}})["status"]["allowed"]
    )


class Connection:
    """The API server of a cluster, as this user. It connects at its first use."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._watches: dict[str, Watch] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"cluster {self.cluster.name}"

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of a kind in the namespace ("pods", "jobs", …), or of one object of it."""
        return "/".join([PLACES[kind], "namespaces", self.cluster.namespace, kind, *([name] if name else [])])

    def load(self) -> None:
        """Load the client, outside of any limit: it takes a second, and many where much else runs."""
        _ = self._client

    def get(self, path: str, **query: str) -> Object:
        return self.ask("GET", path, None, **query)

    def ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content: str = "application/json",
        **query: str,
    ) -> Object:
        """Carry out one request and return the answer.

        Raises:
            ApiError: the API server refuses it, or cannot be reached.
            RequestError: this machine knows no such cluster.
        """
        limits_s = (CONNECT_LIMIT_S, ANSWER_LIMIT_S)
        answer = self._request_answer(
            path, method, query, body=body, content=content, response_type="object", _request_timeout=limits_s
        )
        if not isinstance(answer, dict):  # a page of something between
            raise self._unreachable(f"what answers is no API server: {message_line(answer)}")
        return answer

    def events(self, path: str, **query: str) -> Iterator[Object]:
        """Begin a watch; return its events as they come, until the API server ends it. Raises ApiError."""
        limits_s = (CONNECT_LIMIT_S, WATCH_SILENCE_S)
        parameters = {**query, "watch": "1"}
        answer = self._request_answer(
            path, "GET", parameters, _preload_content=False, _request_timeout=limits_s
        )

        def parsed_events() -> Iterator[Object]:
            left = b""
            with contextlib.closing(answer), self._errors():
                for piece in answer.stream(None, decode_content=False):
                    *lines, left = (left + piece).split(b"\n")
                    yield from map(json.loads, lines)

        return parsed_events()

    def watched(self, kind: str, labels: str) -> Watch:
        """Return the watch over objects of a kind; there is one, however many ask.

        JobSets are none where the cluster has no such kind, or this user no right to any.
        """
        with self._lock:
            return self._watches.setdefault(
                f"{kind} {labels}",
                Watch(
                    self, self.path(kind), labels, absent=(NOT_FOUND, FORBIDDEN) if kind == "jobsets" else ()
                ),
            )

    def program(self, pod: str, container: str, argv: Sequence[str], *, terminal: bool = False) -> Any:
        """Start a program in a pod; return its streams, as `kubernetes.stream.ws_client.WSClient` has them."""
        from kubernetes import stream

        return self._channel(
            stream.stream,
            "connect_get_namespaced_pod_exec",
            pod,
            container=container,
            command=[*argv],
            stdin=True,
            stdout=True,
            stderr=not terminal,
            tty=terminal,
            binary=True,
            _preload_content=False,
        )

    @contextlib.contextmanager
    def forwarded(self, pod: str, port: int) -> Iterator[int]:
        """Open a port of this machine's loopback that leads to one of a pod."""
        from kubernetes import stream

        def lead(near: socket.socket) -> None:
            with near, contextlib.suppress(OSError, HostError):
                call = "connect_get_namespaced_pod_portforward"
                tunnel = self._channel(stream.portforward, call, pod, ports=str(port))
                with contextlib.closing(tunnel):
                    far = tunnel.socket(port)
                    sending = in_thread(functools.partial(_pump, near, far))
                    _pump(far, near)
                    sending.result()

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    near, _ = listener.accept()
                    in_thread(functools.partial(lead, near))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            in_thread(serve)
            try:
                yield listener.getsockname()[1]
            finally:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # a close alone does not wake up who waits

    def _channel(self, opened: Callable[..., Any], call: str, pod: str, **options: Any) -> Any:
        import kubernetes.client

        with self._errors():  # each with a client of its own: it is changed for the length of the call
            api = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(self._client.configuration))
            return opened(getattr(api, call), pod, self.cluster.namespace, **options)

    def _request_answer(
        self,
        path: str,
        method: str,
        query: Mapping[str, str],
        *,
        content: str = "application/json",
        **options: Any,
    ) -> Any:
        with self._errors():
            return self._client.call_api(
                path,
                method,
                query_params=[*query.items()],
                header_params={"Accept": "application/json", "Content-Type": content},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                **options,
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import google.auth.exceptions
        import urllib3.exceptions
        from kubernetes.client.exceptions import ApiException

        try:
            yield
        except google.auth.exceptions.GoogleAuthError as error:
            reason = f"no credentials of Google's ({message_line(error)})"
            remedy = "`gcloud auth application-default login`"
            raise ApiError(host=self.name, reason=reason, remedy=remedy) from None
        except ApiException as error:
            raise self._refused(error) from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:  # of an answer that is no JSON
            raise self._unreachable(message_line(getattr(error, "reason", None) or error)) from None

    def _refused(self, error: Any) -> ApiError:
        if not error.status:  # it has said nothing; the client tells the reason in words
            prefix, _, tls_error = str(error.reason).partition("SSLError\n")
            return (
                self._unreachable(tls_error)
                if tls_error
                else ApiError(host=self.name, reason=message_line(prefix))
            )
        try:
            message = json.loads(error.body)["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason or "no reason given"
        remedy = {
            401: "log in again, as its kubeconfig wants it; on GKE `gcloud auth application-default login`",
            FORBIDDEN: "have it granted in the cluster (docs/kubernetes.md)",
        }.get(error.status, "")
        return ApiError(host=self.name, reason=message_line(message), remedy=remedy, status=error.status)

    def _unreachable(self, message: str) -> ApiError:
        message = re.sub(r"^(<[^>]*>|\w+\([^)]*\)): ", "", message)
        # Where the client cannot be made, that is what is told.
        host = self._client.configuration.host if "_client" in self.__dict__ else self.cluster.endpoint
        return ApiError(
            host=self.name,
            reason=f"its API server{f' {host}' if host else ''} cannot be reached ({message})",
            remedy="see that this machine may reach it",
        )

    @functools.cached_property
    def _client(self) -> Any:
        import kubernetes.client

        with _LOADING:
            configuration = kubernetes.client.Configuration()
            (_use_kubeconfig if self.cluster.endpoint is None else _use_google)(self.cluster, configuration)
        host = urllib.parse.urlsplit(configuration.host).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        if is_here or urllib.request.proxy_bypass(host):  # the client forgets what NO_PROXY says
            configuration.proxy = None
        configuration.retries, configuration.connection_pool_maxsize = False, MOST_CONNECTIONS
        return kubernetes.client.ApiClient(configuration)


PLACES = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "serviceaccounts": "/api/v1",
    "jobs": "/apis/batch/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2",
}


def _use_kubeconfig(cluster: Cluster, configuration: Any) -> None:
    """Complete the client's configuration by a context of a kubeconfig. Raises RequestError: there is no such."""
    import kubernetes.config
    import yaml

    path = os.path.expanduser(cluster.kubeconfig) if cluster.kubeconfig else None
    try:
        kubernetes.config.load_kube_config(path, cluster.context, configuration, persist_config=False)
    except (kubernetes.config.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        source = path or os.environ.get("KUBECONFIG") or "~/.kube/config"
        context = f" context {cluster.context}" if cluster.context else ""
        raise RequestError(
            f"tpu-stack:cluster: {source}:{context} cannot be used ({message_line(error)}); "
            "`kubectl config get-contexts` lists what there is"
        ) from None


def _use_google(cluster: Cluster, configuration: Any) -> None:
    """Complete the client's configuration for a GKE cluster, by the user's application default credentials."""
    import google.auth
    import google.auth.transport.requests

    configuration.host = cluster.endpoint
    # The client would take the proxy for http first, and no company's own certificates.
    configuration.proxy = urllib.request.getproxies().get("https")
    configuration.ssl_ca_cert = next(filter(os.path.exists, [*SYSTEM_CAS]), None)
    if cluster.ca_certificate is not None:
        name = hashlib.sha256(cluster.ca_certificate.encode()).hexdigest()[:16]
        path = user_cache_dir(os.environ) / "clusters" / f"{name}.pem"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, cluster.ca_certificate)
        configuration.ssl_ca_cert = str(path)
    request, credentials = google.auth.transport.requests.Request(), list[Any]()

    def authorize(configuration: Any) -> None:
        if not credentials:
            credentials.append(google.auth.default(scopes=[GOOGLE_SCOPE])[0])
        if not credentials[0].valid:
            credentials[0].refresh(request)
        configuration.api_key["authorization"] = f"Bearer {credentials[0].token}"

    # Asked before each request, as tokens expire; but not at all where there is no key to refresh.
    configuration.api_key["authorization"] = ""
    configuration.refresh_api_key_hook = authorize


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Watch:
    """All objects of a kind that have certain labels, as one watch tells them from the first question on.

    absent: statuses that mean that there are none.
    """

    def __init__(self, connection: Connection, path: str, labels: str, *, absent: Sequence[int]) -> None:
        self._connection, self._path, self._labels, self._absent = connection, path, labels, absent
        self._changed = threading.Condition()
        self._found: dict[str, Object] = {}
        self._gone: dict[str, Object] = {}
        self._error: ApiError | None = None
        self._is_known = False
        self._version = ""
        self._count = 0
        self._thread: threading.Thread | None = None

    def objects(self) -> list[Object]:
        """Return what there is.

        Raises:
            ApiError: the API server does not tell just now.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name=f"watch {self._path}")
                self._thread.start()
            self._changed.wait_for(lambda: self._error is not None or self._is_known, FIRST_LOOK_S)
            if not self._is_known and self._error is None:
                reason = f"its API server has not answered within {FIRST_LOOK_S:.0f} s"
                self._error = ApiError(host=self._connection.name, reason=reason)
            if (error := self._error) is not None:
                raise dataclasses.replace(error)  # each time a new one, as each has a traceback
            return list(self._found.values())

    def gone(self) -> list[Object]:
        """Return objects as they were when they were removed, the latest last."""
        with self._changed:
            return list(self._gone.values())

    def wait(self, limit_s: float) -> None:
        """Wait until something changes, at most so long."""
        with self._changed:
            count = self._count
            self._changed.wait_for(lambda: self._count != count, limit_s)

    def _watch(self) -> None:
        while True:
            try:
                if not self._version:
                    self._list()
                self._follow()
            except ApiError as error:
                with self._changed:
                    if error.status is not None:  # whatever it refuses, it is asked anew for all
                        self._version = ""
                    if error.status in self._absent:
                        self._found, self._error, self._is_known = {}, None, True
                    elif error.status != TOO_OLD:
                        self._error = error
                    self._note()
                time.sleep(WATCH_S if error.status in self._absent else WATCH_PAUSE_S)
            except RequestError as error:
                with self._changed:
                    self._error = ApiError(host=self._connection.name, reason=str(error))
                    self._thread = None
                    self._note()
                return

    def _list(self) -> None:
        answer = self._connection.get(self._path, labelSelector=self._labels)
        kind = answer["kind"].removesuffix("List")
        with self._changed:
            fresh = {item["metadata"]["uid"]: {"kind": kind, **item} for item in answer["items"]}
            for uid in self._found.keys() - fresh.keys():
                self._forget(uid, self._found[uid])
            self._found, self._error, self._is_known = fresh, None, True
            self._note(answer["metadata"]["resourceVersion"])

    def _follow(self) -> None:
        events = self._connection.events(
            self._path,
            labelSelector=self._labels,
            resourceVersion=self._version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_S),
        )
        with self._changed:
            self._error = None
        for event in events:
            self._take(event["type"], event["object"])

    def _take(self, kind: str, item: Object) -> None:
        if kind == "ERROR":
            raise ApiError(
                host=self._connection.name, reason=item.get("message", ""), status=item.get("code", 500)
            )
        uid = item["metadata"].get("uid", "")
        with self._changed:
            if kind == "DELETED":
                self._found.pop(uid, None)
                self._forget(uid, item)
            elif kind != "BOOKMARK":
                self._found[uid] = item
            self._note(item["metadata"]["resourceVersion"])

    def _forget(self, uid: str, item: Object) -> None:
        self._gone[uid] = item
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def _note(self, version: str | None = None) -> None:
        self._version = self._version if version is None else version
        self._count += 1
        self._changed.notify_all()


def shell(program: Any) -> int:
    """Join this terminal to a program in a pod until it ends; return its exit code.

    Raises:
        HostError: its connection is lost.
    """
    import select
    import termios
    import tty

    import websocket

    def tell_size() -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        program.write_channel(4, json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    size: os.terminal_size | None = None
    try:
        tty.setraw(keys, termios.TCSADRAIN)  # what was typed ahead is kept
        while program.is_open():
            if size != (size := os.get_terminal_size(sys.stdout.fileno())):
                tell_size()
            select.select([keys, program.sock.sock], [], [], 0.5)
            program.update(timeout=0)
            sys.stdout.buffer.write(program.read_channel(1) or b"")
            sys.stdout.buffer.flush()
            if select.select([keys], [], [], 0)[0]:
                program.write_channel(0, os.read(keys, 4096))
        with contextlib.suppress(TypeError):  # no exit code has come
            return program.returncode or 0
        raise OSError("it ended without a word")
    except (websocket.WebSocketException, OSError):
        raise HostError(host="", reason="the connection to its pod was lost") from None
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
