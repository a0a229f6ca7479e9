"""All that the author of a plug-in reads: backend, device and what only some devices have, native library, transport, store."""
