"""Serves the stand-in to the engine that started it: prints the port and lives as long as that engine does.

python -m rehearsal.gcp_stand_in ENGINE_ADDRESS
"""

import os
import sys
import threading
import time
from concurrent import futures

import grpc
from pulumi.runtime.proto import provider_pb2_grpc

from rehearsal.gcp_stand_in.service import Service

# Each resource that is being made holds a thread while it waits.
THREADS = 128
LARGEST_MESSAGE = 400 * 1024 * 1024
PARENT_POLL_S = 0.2


def main(arguments: list[str]) -> None:
    """Returns when the process that started this one is gone."""
    parent = os.getppid()
    limits = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.so_reuseport", 0)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=THREADS), options=limits)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(
        Service(arguments[0] if arguments else ""), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    gone = threading.Thread(target=_wait_for_end_of, args=(parent,), name="parent")
    gone.start()
    gone.join()
    # A request that hangs must not keep a process that nobody listens to.
    os._exit(0)


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
