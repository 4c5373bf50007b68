"""What crosses a process boundary: messages, the table of loss components, the transport that carries both ways."""
