"""What touches the outside world: devices, native libraries, transports. One folder or file each."""

if __name__ != "xvcomm.backends":
    raise ImportError("import xvcomm.backends, not backends: this folder is a part of the package xvcomm")
