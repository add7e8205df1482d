package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// errorReply is the body of every answer that is not a success.
type errorReply struct {
	Error client.Error `json:"error"`
}

// plainText is the body of an answer that is not JSON.
type plainText string

// marshalReply returns v, an object that is not empty, with the field apiVersion before its others. Only the
// answers of SGLang's paths have no version.
func marshalReply(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	if _, isBare := v.(workersReply); isBare || err != nil {
		return data, err
	}
	return slices.Insert(data, 1, []byte(`"apiVersion":"`+client.APIVersion+`",`)...), nil
}

// notNull makes a list that is empty [] in JSON.
func notNull[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// newErrorReply returns the body of an answer that is not a success, with the part of err that a user can act
// on. Details are lines for people; Faults hold the same with positions, for editors.
func newErrorReply(err error) errorReply {
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
	e.Faults = ConvertFaults(faults)
	return errorReply{e}
}

// WriteError answers with an error in the form of this API and returns the HTTP status.
func WriteError(w http.ResponseWriter, err error) int {
	body := newErrorReply(err)
	status := cmp.Or(problem.HTTPStatus(problem.Code(body.Error.Code)), http.StatusInternalServerError)
	writeJSON(w, status, body)
	return status
}

// writeNotAllowed answers 405. No problem code maps to 405, so the body has code invalid_argument; the hint
// lists the methods of the Allow header.
func writeNotAllowed(w http.ResponseWriter, r *http.Request) {
	err := problem.New(problem.InvalidArgument, "%s does not take %s", r.URL.Path, r.Method).
		WithHint("it takes %s", w.Header().Get("Allow"))
	writeJSON(w, http.StatusMethodNotAllowed, newErrorReply(err))
}

// writeJSON answers with v. It ignores write errors: they mean that the client has left.
func writeJSON(w http.ResponseWriter, status int, v any) {
	data, err := marshalReply(v)
	if err != nil {
		const fault = `","error":{"code":"internal","message":"encode answer"}}`
		http.Error(w, `{"apiVersion":"`+client.APIVersion+fault, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(data, '\n'))
}
