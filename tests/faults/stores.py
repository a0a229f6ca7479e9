"""The stores of jobs whose ranks are lost: a launcher's, a folder, and one that rank 0 serves."""

import socket

KINDS = ("launcher", "file", "rank 0")


def variables(kind, folder):
    """Variables of the ranks of a job with a kind of store; a folder is made."""
    if kind == "file":
        folder.mkdir(mode=0o700)
        return {"XVCOMM_STORE": f"file://{folder}"}
    if kind == "rank 0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return {"XVCOMM_STORE": f"tcp://127.0.0.1:{probe.getsockname()[1]}"}
    return {}
