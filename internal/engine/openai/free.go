package openai

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
)

// Bounds of a form.
const (
	maxParts     = 256
	maxFormModel = 1 << 10 // bytes of the field model
)

// ScanFree reads body as a request on a route whose body may be anything. A JSON object is scanned as on
// other routes. Of a form, the field model is read. The rest passes unread; the engine refuses what it does
// not take. The error is a *BodyError.
func (b *Body) ScanFree(route Route, contentType string, body []byte) error {
	kind, params, err := mime.ParseMediaType(contentType)
	isJSON := kind == "application/json"
	if start := bytes.TrimLeft(body, " \t\r\n"); len(start) > 0 && start[0] == '{' && kind != formType {
		switch scanErr := b.Scan(route, body); {
		case scanErr == nil:
			if b.PromptBytes == 0 {
				b.TextBytes = len(body)
			}
			return nil
		case isJSON:
			return scanErr
		}
	}
	b.reset(route)
	b.Strip.Close()
	b.Choices, b.IsPlain = 1, true
	b.TextBytes = len(body)
	if kind != formType {
		return nil
	}
	b.TextBytes, b.MediaParts = 0, 1
	if err != nil || params["boundary"] == "" {
		return newBodyError(nil, "the content type of the form names no boundary")
	}
	return b.readForm(multipart.NewReader(bytes.NewReader(body), params["boundary"]))
}

const formType = "multipart/form-data"

// readForm reads the field model. It reads the form to its end, because a second model, or a form that does
// not end, is refused.
func (b *Body) readForm(r *multipart.Reader) error {
	for range maxParts {
		part, err := r.NextRawPart()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return newBodyError(nil, "the form is malformed: its boundary does not come, or a part has no "+
				"header")
		case part.FormName() != "model":
			continue
		case b.HasModel:
			return newBodyError([]byte("model"), "the form has the field model twice; send it once")
		}
		model, err := io.ReadAll(io.LimitReader(part, maxFormModel+1))
		if err != nil || len(model) > maxFormModel {
			return newBodyError([]byte("model"), "the form's field model does not end, or is too long")
		}
		b.Model, b.HasModel = model, true
	}
	return newBodyError(nil, "the form has more than %d parts", maxParts)
}
