"""What the command's log leaves out: what dbsync tells in a sentence of its own, and what nobody should read."""

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

QUOTED = """
import logging
from dbsync import Settings
from dbsync.cli_show import configure_logging

settings = Settings(to="postgresql://HOST/shop?user=u&password=shop")
configure_logging("info", settings.mask)
log = logging.getLogger("dbsync.test")
log.warning("no route to %s with password=shop. Trying again in 0.5 s.", settings.to)
log.info("following 1 table at localhost:5432/shop")
"""


def test_a_java_that_is_gone_is_not_told_by_its_gateway() -> None:
    done = subprocess.run([sys.executable, "-c", RESET], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.endswith(" INFO it raised\n")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_secret_that_a_driver_quotes_is_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", QUOTED], capture_output=True, text=True, check=True, timeout=60)
    quoted, ours = done.stderr.splitlines()
    assert quoted.endswith(" WARNING no route to postgresql://HOST/*** with password=***. Trying again in 0.5 s.")
    # A line of dbsync's own words holds no secret, and stays readable when a password is an everyday word.
    assert ours.endswith(" INFO following 1 table at localhost:5432/shop")
