// Package ingress is the OpenAI surface of a node: it reads a request, picks a rank with the application's
// Router, asks the rank's DPServer for a ticket, and relays the engine's answer byte for byte. When every
// rank is full, requests wait in one queue per application. A failure before the first byte is retried on
// another rank; a failure after it ends the stream with an error event and a cut connection. See DESIGN.md
// for the state machine of a request.
package ingress
