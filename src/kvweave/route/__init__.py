"""Many engines behind one endpoint, by sets of chunks: ``kvweave route``.

A request goes ``app`` (guards of `kvweave.serve.guard`) -> ``completions`` | ``contexts`` | ``chunks`` |
``own`` -> ``choose`` -> ``forward`` -> a worker. What is known of workers is in ``worker`` (load, health),
``holding`` (which text they have) and ``directory`` (which named chunks).
"""
