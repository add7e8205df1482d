package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// errorReply is the body of every answer that is not a success. Details are lines for people; Faults hold the
// same with positions, for editors.
type errorReply struct {
	envelope
	Error client.Error `json:"error"`
}

// newErrorBody converts err to the part that a user can act on.
func newErrorBody(err error) client.Error {
	var faults app.Faults
	var p *problem.Error
	switch {
	case errors.As(err, &faults):
		p = faults.Problem()
	case errors.As(err, &p):
	case errors.Is(err, context.DeadlineExceeded):
		p = problem.New(problem.Timeout, "no answer in time: %w", err).
			WithHint("the node may be busy or its disk slow; try again")
	default:
		p = problem.New(problem.Internal, "%w", err).WithHint("this is a fault of dpserve; its log says more")
	}
	e := client.Error{Code: string(p.Code), Message: p.Message, Hint: p.Hint, Doc: p.Doc, Details: p.Details}
	for _, f := range faults {
		e.Faults = append(e.Faults, client.Fault(f))
	}
	return e
}

// writeError answers with an error and returns the HTTP status.
func writeError(w http.ResponseWriter, err error) int {
	b := newErrorBody(err)
	status := problem.HTTPStatus(problem.Code(b.Code))
	if status == 0 {
		status = http.StatusInternalServerError
	}
	writeJSON(w, status, errorReply{envelope{client.APIVersion}, b})
	return status
}

// writeJSON answers with v. It ignores write errors: they mean that the client has left.
func writeJSON(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		const fault = `","error":{"code":"internal","message":"encode answer"}}`
		http.Error(w, `{"apiVersion":"`+client.APIVersion+fault, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
}

// WriteError answers a request with an error in the form of this API.
func WriteError(w http.ResponseWriter, err error) { writeError(w, err) }
