"""Networks: frozen graphs of typed layers, backends, and worker processes."""
