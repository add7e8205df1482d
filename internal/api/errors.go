package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// errorReply is the body of every answer that is not a success.
type errorReply struct {
	envelope
	Error errorBody `json:"error"`
}

// errorBody is a problem.Error on the wire. Details are lines for people; Faults hold the same with
// positions, for editors.
type errorBody struct {
	problem.Error
	Faults app.Faults `json:"faults,omitempty"`
}

// newErrorBody converts err to the part that a user can act on.
func newErrorBody(err error) errorBody {
	var b errorBody
	if errors.As(err, &b.Faults) {
		b.Error = *b.Faults.Problem()
		return b
	}
	var p *problem.Error
	switch {
	case errors.As(err, &p):
		b.Error = *p
	case errors.Is(err, context.DeadlineExceeded):
		b.Error = *problem.New(problem.Timeout, "no answer in time: %w", err).
			WithHint("the node may be busy or its disk slow; try again")
	default:
		b.Error = *problem.New(problem.Internal, "%w", err).
			WithHint("this is a fault of dpserve; its log says more")
	}
	return b
}

// errorFromBody returns the error that newErrorBody converted, as far as the wire kept it: errors.As finds
// the *problem.Error and app.Faults.
func errorFromBody(b errorBody) *problem.Error {
	e := &b.Error
	if len(b.Faults) > 0 {
		e = problem.New(b.Code, "%w", b.Faults)
		e.Message, e.Hint, e.Doc, e.Details = b.Message, b.Hint, b.Doc, b.Details
	}
	return e
}

// writeError answers with an error and returns the HTTP status.
func writeError(w http.ResponseWriter, err error) int {
	b := newErrorBody(err)
	status := problem.HTTPStatus(b.Code)
	if status == 0 {
		status = http.StatusInternalServerError
	}
	writeJSON(w, status, errorReply{envelope{apiVersion}, b})
	return status
}

// writeJSON answers with v. It ignores write errors: they mean that the client has left.
func writeJSON(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		http.Error(w, `{"apiVersion":"`+apiVersion+`","error":{"code":"internal","message":"encode answer"}}`,
			http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
}

// WriteError answers a request with an error in the form of this API.
func WriteError(w http.ResponseWriter, err error) { writeError(w, err) }
