"""What the simulators of Google's APIs share: the HTTP server, Google's discovery documents, errors, lists in pages."""
