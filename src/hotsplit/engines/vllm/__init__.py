"""vLLM: a plugin for its released versions, through its own extension points; no file of it is patched."""
