"""Engines: thin adapters that hand their weights to the banks and drive them. They never import each other."""
