package enginehttp

import "errors"

// ErrAborted is what a body's Read gives when the request's context has ended. Ask the context for the cause.
var ErrAborted = errors.New("the request was given up")

// errClosed is what a body's Read gives behind Close.
var errClosed = errors.New("read of a closed body")

// SendError says why Send gave no answer. Err tells an end of file (io.EOF) from a reset
// (syscall.ECONNRESET), and is a *net.OpError of op "dial" if no connection came about; after the context's
// end it is the context's cause.
type SendError struct {
	Reused bool // the connection had waited for a request: behind another one, or since Warm
	Begun  bool // a byte of an answer has come
	Err    error
}

// Error implements error.
func (e *SendError) Error() string { return "engine: " + e.Err.Error() }

// Unwrap gives the reason.
func (e *SendError) Unwrap() error { return e.Err }

// ProtocolError is an answer that is no well-formed HTTP/1.1 as this package wants it.
type ProtocolError struct{ What string }

// Error implements error.
func (e *ProtocolError) Error() string { return "malformed answer: " + e.What }

func malformed(what string) error { return &ProtocolError{What: what} }
