package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"mime"
	"slices"
	"strings"
)

// ModelField is where a request's body names its model.
type ModelField struct {
	Name   string
	at     Span // the value as written
	isForm bool
}

// errFound ends a scan.
var errFound = errors.New("found")

// FindModel finds the model in a body that Scan, ScanHead or ScanFree has accepted. ok is false if the body
// names none.
func FindModel(body []byte, contentType string, isPlain bool) (f ModelField, ok bool) {
	if isPlain {
		return findFormModel(body, contentType)
	}
	err := Members(body, func(key []byte, _, value Span) error {
		if string(key) != "model" {
			return nil
		}
		f.at = value
		return errFound
	})
	if raw := body[f.at.Start:f.at.End]; errors.Is(err, errFound) && raw[0] == '"' {
		f.Name = string(unquoted(raw))
		return f, true
	}
	return ModelField{}, false
}

// unquoted is the content of a checked string.
func unquoted(raw []byte) []byte {
	if raw = raw[1 : len(raw)-1]; bytes.IndexByte(raw, '\\') >= 0 {
		return Unescape(nil, raw)
	}
	return raw
}

// findFormModel finds the field model of a form. A form whose lines do not end in CRLF has none.
func findFormModel(body []byte, contentType string) (f ModelField, ok bool) {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != formType || params["boundary"] == "" {
		return f, false
	}
	delimiter := []byte("\r\n--" + params["boundary"])
	end := len(delimiter) - 2 // behind the delimiter before the part
	if !bytes.HasPrefix(body, delimiter[2:]) {
		if end = bytes.Index(body, delimiter); end < 0 {
			return f, false
		}
		end += len(delimiter)
	}
	for range maxParts {
		size := bytes.Index(body[end:], delimiter)
		if size < 0 || !bytes.HasPrefix(body[end:], lineEnd) {
			return f, false
		}
		part := body[end : end+size]
		end += size + len(delimiter)
		head, value, isPart := bytes.Cut(part, []byte("\r\n\r\n"))
		if isPart && isModelPart(head) {
			isEnd := bytes.HasPrefix(body[end:], lineEnd) || bytes.HasPrefix(body[end:], []byte("--"))
			last := end - len(delimiter)
			return ModelField{string(value), Span{last - len(value), last}, true}, isEnd
		}
	}
	return f, false
}

var lineEnd = []byte("\r\n")

// isModelPart reports whether head is the header of the form's field model.
func isModelPart(head []byte) bool {
	for line := range bytes.SplitSeq(head, lineEnd) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		if !bytes.EqualFold(name, []byte("Content-Disposition")) {
			continue
		}
		kind, params, err := mime.ParseMediaType(string(value))
		return err == nil && kind == "form-data" && params["name"] == "model"
	}
	return false
}

// Replaced is body, in which f was found, with another name in the field.
func (f ModelField) Replaced(body []byte, name string) []byte {
	value := []byte(name)
	if !f.isForm {
		value = AppendString(nil, name)
	}
	return slices.Concat(body[:f.at.Start], value, body[f.at.End:])
}

// ModelWriter replaces the engine's name of the model by the client's in an answer: in the member model of a
// JSON object, and of each event of a stream. The answer may come in pieces of any size. It is not for
// concurrent use.
type ModelWriter struct {
	engine   string
	client   []byte // as JSON
	holder   string
	isStream bool

	depth     int
	hasKeys   bool // the outermost value is an object
	isDone    bool // the rest of the object, or of the event, has no name to replace
	inHolder  bool
	inString  bool
	isEscaped bool
	wantsKey  bool // the next string is the name of a member that counts
	isKey     bool
	isValue   bool   // the string is the model
	key       []byte // as written, cut at maxNote
	noted     note   // of the member whose value comes next
	held      []byte // of the model so far, as written
}

// note is what a member is to a ModelWriter.
type note uint8

const (
	anyMember note = iota
	modelMember
	holderMember
)

const (
	maxNote = 16      // bytes of a name that are compared: "model" and the holders are shorter
	maxHeld = 4 << 10 // bytes of a model that are held back; a longer one is none that dpserve knows
)

// NewModelWriter makes the writer for an answer on route r.
func NewModelWriter(r Route, isStream bool, engine, client string) *ModelWriter {
	return &ModelWriter{
		engine: engine, client: AppendString(nil, client), holder: routes[r].holder, isStream: isStream,
	}
}

// Append appends b, the next bytes of the answer, to dst. It keeps back the beginning of a name that b does
// not end.
func (w *ModelWriter) Append(dst, b []byte) []byte {
	from := 0 // of what is not yet in dst
	for i := 0; i < len(b); i++ {
		switch {
		case w.isDone:
			i = w.skip(b, i)
		case w.isValue:
			end := w.text(b, i)
			w.held = append(w.held, b[i:end]...)
			switch i, from = end, end; {
			case end < len(b):
				dst, from = w.appendModel(dst), end+1
				w.endString()
			case len(w.held) > maxHeld:
				dst = append(append(dst, '"'), w.held...)
				w.isValue = false
			}
		case w.inString:
			end := w.text(b, i)
			if w.isKey && len(w.key) < maxNote {
				w.key = append(w.key, b[i:min(end, i+maxNote-len(w.key))]...)
			}
			if i = end; i < len(b) {
				w.endString()
			}
		default:
			w.structure(b[i])
			if w.isValue {
				dst, from = append(dst, b[from:i]...), i+1
			}
		}
	}
	return append(dst, b[from:]...)
}

// End appends what is kept back of an answer that has ended.
func (w *ModelWriter) End(dst []byte) []byte {
	if !w.isValue {
		return dst
	}
	w.isValue = false
	return append(append(dst, '"'), w.held...)
}

// skip is the place of the last byte before the next event; the last one of b if it has none.
func (w *ModelWriter) skip(b []byte, i int) int {
	if !w.isStream {
		return len(b) - 1
	}
	n := bytes.IndexByte(b[i:], '\n')
	if n < 0 {
		return len(b) - 1
	}
	w.beginEvent()
	return i + n
}

// beginEvent forgets the event before: its JSON stands in one line.
func (w *ModelWriter) beginEvent() {
	w.depth, w.hasKeys, w.isDone, w.inHolder, w.wantsKey = 0, false, false, false, false
	w.noted = anyMember
}

// text is where the string's closing quote is in b; len(b): not here.
func (w *ModelWriter) text(b []byte, i int) int {
	for ; i < len(b); i++ {
		if w.isEscaped {
			w.isEscaped = false
			continue
		}
		if i = plain(b, i); i >= len(b) || b[i] == '"' {
			return i
		}
		w.isEscaped = b[i] == '\\'
	}
	return len(b)
}

// endString reads the quote behind a string.
func (w *ModelWriter) endString() {
	switch {
	case w.isValue:
		w.isDone = true
	case w.isKey && string(w.key) == "model":
		w.noted = modelMember
	case w.isKey && w.depth == 1 && w.holder != "" && string(w.key) == w.holder:
		w.noted = holderMember
	}
	w.inString, w.isKey, w.isValue = false, false, false
}

// appendModel appends the value that was held back, or the client's name in its place.
func (w *ModelWriter) appendModel(dst []byte) []byte {
	name := string(w.held)
	written := `"` + name + `"`
	if strings.Contains(name, `\`) && json.Unmarshal([]byte(written), &name) != nil {
		name = "" // it is no JSON
	}
	if name == w.engine {
		return append(dst, w.client...)
	}
	return append(dst, written...)
}

// structure reads a byte outside of strings.
func (w *ModelWriter) structure(c byte) {
	switch c {
	case '"':
		w.beginString()
	case '{', '[':
		w.depth++
		switch w.depth {
		case 1:
			w.hasKeys = c == '{'
			w.wantsKey = w.hasKeys
		case 2:
			w.inHolder = c == '{' && w.noted == holderMember
			w.wantsKey = w.inHolder
		}
		w.noted = anyMember
	case '}', ']':
		w.depth = max(w.depth-1, 0)
		w.inHolder = w.inHolder && w.depth > 1
	case ',':
		w.wantsKey = w.depth == 1 && w.hasKeys || w.depth == 2 && w.inHolder
		w.noted = anyMember
	case '\n':
		if w.isStream {
			w.beginEvent()
		}
	}
}

// beginString reads the quote before a string. Outside of any object, it is the text of a line of the stream.
func (w *ModelWriter) beginString() {
	if w.depth == 0 {
		return
	}
	w.inString, w.isEscaped = true, false
	w.isKey, w.wantsKey, w.key = w.wantsKey, false, w.key[:0]
	w.isValue = !w.isKey && w.noted == modelMember
	w.noted, w.held = anyMember, w.held[:0]
}
