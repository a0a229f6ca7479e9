"""To its caller the interpreter, but the program is forked by `server.py`: `client.py SOCKET CLIENT PYTHON ARGUMENT...`.

It passes on its signals, and ends as the program does. With options of Python beyond `-u`, `-m` and `-c` it becomes PYTHON.
"""

import array
import marshal
import os
import resource
import signal
import socket
import sys

PASSED_ON = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2

LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def main():
    path, client, python, *arguments = sys.argv[1:]
    unbuffered = arguments[:1] == ["-u"]
    program = arguments[unbuffered:]
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        os.execv(python, [python, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    limits = {number: resource.getrlimit(number) for number in LIMITS}
    request = marshal.dumps([client, program, unbuffered, os.getcwd(), dict(os.environ), limits])
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", range(3)))]
    server.sendmsg([len(request).to_bytes(8, "big")], streams)
    server.sendall(request)
    child = receive(server)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    code = receive(server)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive(server):
    return int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big", signed=True)


main()
