"""All that the author of a plug-in reads: device, native collective, transport, store."""
