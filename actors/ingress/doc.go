// Package ingress is the OpenAI surface of a node: it reads a request, picks a rank by the application's Router, asks the
// rank's DPServer for a ticket, and relays the engine's answer byte for byte. Requests wait in one FIFO per application
// when every rank is full; a failure before the first byte is tried again on another rank; a failure behind it ends the
// stream with an error event and a cut connection. See DESIGN.md for the state machine of a request.
package ingress
