"""What the command's log leaves out: dbsync tells it in a sentence of its own."""

from __future__ import annotations

import subprocess
import sys

# A JVM that is killed while it works on a command resets the connection.
RESET = """
import logging, socket, struct, threading
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError
from dbsync.cli_show import configure_logging

def reset_at_the_first_command(server):
    connection, _ = server.accept()
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

configure_logging("info")
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=reset_at_the_first_command, args=[server]).start()
gateway = JavaGateway(gateway_parameters=GatewayParameters(port=server.getsockname()[1]))
try:
    gateway.jvm.java.lang.System.nanoTime()
except Py4JError:
    logging.getLogger("dbsync.test").info("it raised")
"""


def test_a_java_that_is_gone_is_not_told_by_its_gateway() -> None:
    done = subprocess.run([sys.executable, "-c", RESET], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.endswith(" INFO it raised\n")
    assert done.stderr.count("\n") == 1, done.stderr
