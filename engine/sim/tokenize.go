package sim

import (
	"net/http"
	"strconv"

	em "github.com/dpserve/dpserve/enginemodel"
)

// textBody is the common beginning of the tokenizer routes.
func (s *Server) textBody(w http.ResponseWriter, r *http.Request) (*fields, bool) {
	body, apiErr := s.body(r)
	f := &fields{body: body}
	if apiErr == nil {
		name := f.str("model")
		if apiErr = f.err(); apiErr == nil {
			apiErr = s.set.knowsModel(name)
		}
	}
	if apiErr == nil && s.isStopping() {
		apiErr = internalError(msgStopping)
	}
	if apiErr != nil {
		s.fail(w, apiErr)
		return nil, false
	}
	return f, true
}

// tokenize serves a text or a conversation.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	f, ok := s.textBody(w, r)
	if !ok {
		return
	}
	var ids []uint32
	if f.body.get("messages").present() {
		add := f.body.get("add_generation_prompt")
		ids = em.AppendChat(nil, f.messages(), !add.present() || f.flag("add_generation_prompt"))
	} else {
		if !f.body.get("prompt").present() {
			f.missing("prompt")
		}
		ids = em.AppendTokens(nil, f.str("prompt"))
	}
	withText := f.flag("return_token_strs")
	if apiErr := f.err(); apiErr != nil {
		s.fail(w, apiErr)
		return
	}
	b := strconv.AppendInt([]byte(`{"count":`), int64(len(ids)), 10)
	b = strconv.AppendInt(append(b, `,"max_model_len":`...), int64(s.set.maxModelLen), 10)
	b = appendIDList(append(b, `,"tokens":`...), ids)
	b = append(b, `,"token_strs":`...)
	if withText {
		b = append(b, '[')
		for i, id := range ids {
			b = appendJSON(comma(b, i), tokenText(id))
		}
		b = append(b, "]}"...)
	} else {
		b = append(b, "null}"...)
	}
	s.writeJSON(w, http.StatusOK, b)
}

// detokenize turns ids into text.
func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	f, ok := s.textBody(w, r)
	if !ok {
		return
	}
	if !f.body.get("tokens").present() {
		f.missing("tokens")
	}
	var ids []uint32
	for _, n := range f.nums("tokens") {
		if n < 0 || n > maxTokenID {
			f.faults = append(f.faults, fieldError{kind: outOfVocabulary, input: strconv.Itoa(n)})
			break
		}
		ids = append(ids, uint32(n))
	}
	if apiErr := f.err(); apiErr != nil {
		s.fail(w, apiErr)
		return
	}
	s.writeJSON(w, http.StatusOK, append(appendJSON([]byte(`{"prompt":`), em.Text(ids)), '}'))
}
