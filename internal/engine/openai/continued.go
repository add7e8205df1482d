package openai

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
)

// Chunk is one event of a stream, as far as it matters to an answer that goes on from another engine. Spans
// are those of values in its data; a zero one is not there.
type Chunk struct {
	id, created, model Span // as written
	role               Span // the value
	roleMember         Span // of the delta, without a comma
	content            Span // of a delta's content, or of text; a string
	delta              Span // an object
	usage              Span // an object
	choices            int
	isFinished         bool
	isOther            bool // it shows something that is no text
}

// Read reads the data of an event; false if that is no chunk.
func (k *Chunk) Read(data []byte) bool {
	*k = Chunk{}
	s := scanner{b: data}
	i := s.space(0)
	if s.peek(i) != '{' {
		return false
	}
	end := s.members(i, 1, func(key []byte, _ bool, v Span) bool {
		raw := data[v.Start:v.End]
		switch string(key) {
		case "id":
			k.id = v
		case "created":
			k.created = v
		case "model":
			k.model = v
		case "usage":
			if raw[0] == '{' {
				k.usage = v
			}
		case "choices":
			if raw[0] == '[' {
				Elements(raw, func(e Span) bool {
					k.choices++
					k.readChoice(data, Span{v.Start + e.Start, v.Start + e.End})
					return true
				})
			}
		case "error", "prompt_token_ids":
			k.isOther = k.isOther || holds(raw)
		}
		return true
	})
	return end >= 0
}

func (k *Chunk) readChoice(data []byte, at Span) {
	if data[at.Start] != '{' {
		k.isOther = true
		return
	}
	s := scanner{b: data}
	s.members(at.Start, 3, func(key []byte, _ bool, v Span) bool {
		switch raw := data[v.Start:v.End]; string(key) {
		case "finish_reason":
			k.isFinished = holds(raw)
		case "text":
			k.readContent(raw, v)
		case "logprobs", "token_ids", "prompt_token_ids":
			k.isOther = k.isOther || holds(raw)
		case "delta":
			if raw[0] == '{' {
				k.delta = v
				k.readDelta(data, v)
			}
		}
		return true
	})
}

func (k *Chunk) readDelta(data []byte, at Span) {
	s := scanner{b: data}
	s.members(at.Start, 4, func(key []byte, _ bool, v Span) bool {
		switch raw := data[v.Start:v.End]; string(key) {
		case "role":
			if raw[0] == '"' {
				k.role, k.roleMember = v, Span{s.member, v.End}
			}
		case "content":
			k.readContent(raw, v)
		default: // reasoning, a tool call, a refusal, and what later engines show
			k.isOther = k.isOther || holds(raw)
		}
		return true
	})
}

func (k *Chunk) readContent(raw []byte, at Span) {
	switch raw[0] {
	case '"':
		k.content = at
	case 'n':
	default: // parts
		k.isOther = true
	}
}

// HasToken reports whether a token stands behind the chunk: it has a choice, and more than a role in it.
func (k *Chunk) HasToken() bool {
	return k.choices > 0 && (k.role == Span{} || k.content.End-k.content.Start > len(`""`))
}

// Identity is what is equal in all chunks of one stream, as written.
type Identity struct{ id, created, model []byte }

// Answer is the text of a stream, read from its chunks, and what makes a second stream the rest of it. Reset
// begins it; its memory is used again. Not safe for concurrent use.
type Answer struct {
	Text   []byte // that the client has, decoded
	Tokens int    // chunks with a token so far
	Usage  Usage  // of the whole answer; zero before the second engine has told its own

	identity Identity
	usual    usualChunk
	isPinned bool // it cannot go on from another engine
	chunk    Chunk
	ends     [keptEnds]int // of the last tokens in Text, by Tokens modulo their number
	seam     seam          // to the second engine
}

// keptEnds is for how many tokens an Answer knows where they end.
const keptEnds = 32

// usualChunk is what stands around the text in the last chunk that was read in full. Most chunks of a stream
// differ in nothing else, which saves the reading.
type usualChunk struct{ head, tail []byte }

// textOf is the text of a chunk that differs from the usual one in nothing else. Text with escaped quotes is
// left to the full reading.
func (u *usualChunk) textOf(data []byte) (raw []byte, ok bool) {
	if len(u.head) == 0 || len(data) < len(u.head)+len(u.tail) ||
		!bytes.HasPrefix(data, u.head) || !bytes.HasSuffix(data, u.tail) {
		return nil, false
	}
	raw = data[len(u.head) : len(data)-len(u.tail)]
	return raw, len(raw) > 0 && bytes.IndexByte(raw, '"') < 0 && raw[len(raw)-1] != '\\'
}

// Reset forgets the answer.
func (a *Answer) Reset() {
	*a = Answer{
		Text:     a.Text[:0],
		identity: Identity{a.identity.id[:0], a.identity.created[:0], a.identity.model[:0]},
		usual:    usualChunk{a.usual.head[:0], a.usual.tail[:0]},
		seam:     seam{expect: a.seam.expect[:0], head: a.seam.head[:0], held: a.seam.held[:0]},
	}
}

// MayGoOn reports whether another engine may go on: there is text, and nothing else has been shown.
func (a *Answer) MayGoOn() bool { return !a.isPinned && len(a.Text) > 0 }

// Pin says that the answer has something which is not kept.
func (a *Answer) Pin() { a.isPinned = true }

// Read reads an event that passes to the client unchanged.
func (a *Answer) Read(event []byte) {
	if a.isPinned {
		return
	}
	data := EventData(event)
	if raw, ok := a.usual.textOf(data); ok {
		a.add(raw)
		return
	}
	if len(data) == 0 || data[0] == '[' {
		return
	}
	k := &a.chunk
	if !k.Read(data) || k.isOther || k.choices > 1 {
		a.isPinned = true
		return
	}
	if len(a.identity.id) == 0 {
		a.identity.id = append(a.identity.id[:0], data[k.id.Start:k.id.End]...)
		a.identity.created = append(a.identity.created[:0], data[k.created.Start:k.created.End]...)
		a.identity.model = append(a.identity.model[:0], data[k.model.Start:k.model.End]...)
	}
	isText := k.content.End-k.content.Start > len(`""`)
	switch {
	case isText:
		a.add(data[k.content.Start+1 : k.content.End-1])
	case k.HasToken() && !k.isFinished:
		a.countToken() // a character is incomplete
	}
	if isText && k.role == (Span{}) && !k.isFinished {
		a.usual.head = append(a.usual.head[:0], data[:k.content.Start+1]...)
		a.usual.tail = append(a.usual.tail[:0], data[k.content.End-1:]...)
	}
}

// add adds the text of one token, as written between its quotes.
func (a *Answer) add(raw []byte) {
	if bytes.IndexByte(raw, '\\') < 0 {
		a.Text = append(a.Text, raw...)
	} else {
		a.Text = unescape(a.Text, raw)
	}
	a.countToken()
}

func (a *Answer) countToken() {
	a.ends[a.Tokens%keptEnds] = len(a.Text)
	a.Tokens++
}

// tokensAfter is how many of the last tokens begin at or after a position in the text.
func (a *Answer) tokensAfter(at int) (n int) {
	for n < min(a.Tokens, keptEnds)-1 && a.ends[(a.Tokens-n-2)%keptEnds] >= at {
		n++
	}
	return n
}

// ErrAnotherAnswer says that an engine did not go on with the answer, but began another one.
var ErrAnotherAnswer = errors.New("the engine does not go on with the answer, but begins another one")

// Continue prepares for the stream of another engine. It returns the text that the prompt of that engine ends
// with, and its number of tokens. stops are the request's stop strings. trims: the chat template cuts white
// space from the end of a message.
//
// An engine looks for stop strings only in what it generates. So what may be the beginning of one is not
// sent, nor white space that would be cut: the engine generates it again, and AppendContinued leaves it out.
func (a *Answer) Continue(stops [][]byte, trims bool) (text []byte, tokens int) {
	sent := len(a.Text)
	for _, stop := range stops {
		for n := min(len(stop)-1, len(a.Text)); n > 0; n-- {
			if bytes.HasSuffix(a.Text, stop[:n]) {
				sent = min(sent, len(a.Text)-n)
				break
			}
		}
	}
	if trims {
		sent = len(bytes.TrimRight(a.Text[:sent], " \t\r\n"))
	}
	if sent == 0 {
		sent = len(a.Text)
	}
	again := a.tokensAfter(sent)
	a.seam.begin(a.Text, sent)
	a.seam.prompt = a.Tokens - again
	if isWithin := a.Tokens > again && a.ends[(a.Tokens-again-1)%keptEnds] > sent; isWithin {
		again++ // the end of that token comes again as one of its own
	}
	a.seam.again, a.seam.tokens = again, a.Tokens-again
	a.usual.head = a.usual.head[:0]
	return a.Text[:sent], a.seam.tokens
}

// seam is where the second engine's text meets the first one's.
type seam struct {
	isOpen bool
	expect []byte // the end of the text, which the engine generates again
	head   []byte // the beginning of the text: an engine that generates it does not go on
	held   []byte // of the second engine's text, while it is not known which of the two it is
	prompt int    // tokens of the text that is prompt to the second engine
	again  int    // tokens that it generates again
	tokens int    // those that it does not
}

// Bounds of what shows that an engine begins the answer anew, in bytes.
const (
	leastHead = 16
	mostHead  = 32
)

// begin begins the seam at a position of the text. In a text that repeats its beginning, that beginning shows
// nothing.
func (s *seam) begin(text []byte, at int) {
	s.isOpen, s.held, s.expect = true, s.held[:0], append(s.expect[:0], text[at:]...)
	head := text[:min(len(text), mostHead)]
	if s.head = s.head[:0]; len(head) >= leastHead && bytes.LastIndex(text, head) == 0 {
		s.head = append(s.head, head...)
	}
}

// pass returns what of the second engine's text is new to the client. isLast: no more text comes.
func (s *seam) pass(raw []byte, isLast bool) (fresh []byte, err error) {
	if !s.isOpen {
		return raw, nil
	}
	s.held = append(s.held, raw...)
	switch {
	case len(s.head) > 0 && bytes.HasPrefix(s.held, s.head):
		return nil, ErrAnotherAnswer
	case bytes.HasPrefix(s.head, s.held) && len(s.head) > 0 && !isLast:
		return nil, nil
	case bytes.HasPrefix(s.held, s.expect):
		s.isOpen = false
		return s.held[len(s.expect):], nil
	case bytes.HasPrefix(s.expect, s.held):
		s.isOpen = !isLast // the answer ends within what is generated again
		return nil, nil
	}
	n := 0
	for s.held[n] == s.expect[n] {
		n++
	}
	if len(bytes.TrimSpace(s.expect[n:])) > 0 {
		return nil, ErrAnotherAnswer
	}
	s.isOpen = false
	return s.held[n:], nil
}

// AppendContinued appends an event of the second engine as the client gets it: as one of the first engine's
// stream. An event that shows nothing new is left out.
func (a *Answer) AppendContinued(dst, event []byte) ([]byte, error) {
	data := EventData(event)
	if len(data) == 0 || data[0] == '[' {
		return append(dst, event...), nil
	}
	k := &a.chunk
	switch {
	case !k.Read(data), k.isOther, k.choices > 1,
		k.role != Span{} && string(data[k.role.Start:k.role.End]) != `"assistant"`:
		return dst, ErrAnotherAnswer
	}
	var raw []byte
	if k.content != (Span{}) {
		raw = unescape(nil, data[k.content.Start+1:k.content.End-1])
	}
	fresh, err := a.seam.pass(raw, k.isFinished)
	if err != nil {
		return dst, err
	}
	var edits [8]edit
	list := edits[:0]
	switch {
	case len(fresh) == len(raw):
	case k.content != (Span{}):
		list = append(list, edit{k.content, AppendString(nil, string(fresh))})
	case k.delta != (Span{}): // the chunk that ends the answer has no text of its own
		text := append(AppendString([]byte(`{"content":`), string(fresh)), '}')
		list, k.role = append(list, edit{k.delta, text}), Span{}
	default:
		return dst, ErrAnotherAnswer
	}
	list = k.editIdentity(list, data, &a.identity)
	if k.usage != (Span{}) {
		list = a.editUsage(list, data, k.usage)
	}
	a.Text = append(a.Text, fresh...)
	switch {
	case !k.HasToken(), k.isFinished && len(raw) == 0:
	case a.seam.again > 0:
		a.seam.again--
	default:
		a.countToken()
	}
	if k.choices > 0 && len(fresh) == 0 && !k.isFinished && k.usage == (Span{}) {
		return dst, nil
	}
	slices.SortFunc(list, func(x, y edit) int { return x.at.Start - y.at.Start })
	dst, from := append(dst, "data: "...), 0
	for _, e := range list {
		dst = append(append(dst, data[from:e.at.Start]...), e.with...)
		from = e.at.End
	}
	return append(append(dst, data[from:]...), "\n\n"...), nil
}

// edit replaces what stands at a position.
type edit struct {
	at   Span
	with []byte
}

// editIdentity makes the chunk one of the stream with that identity: its role was sent before.
func (k *Chunk) editIdentity(list []edit, data []byte, of *Identity) []edit {
	for _, e := range [...]edit{{k.id, of.id}, {k.created, of.created}, {k.model, of.model}} {
		if e.at != (Span{}) && len(e.with) > 0 {
			list = append(list, e)
		}
	}
	if k.role != (Span{}) {
		list = append(list, edit{cutMember(data, k.roleMember), nil})
	}
	return list
}

// cutMember is the position of a member with a comma beside it.
func cutMember(data []byte, at Span) Span {
	s := scanner{b: data}
	if i := s.space(at.End); s.peek(i) == ',' {
		return Span{at.Start, i + 1}
	}
	if i := len(bytes.TrimRight(data[:at.Start], " \t\r\n")); data[i-1] == ',' {
		at.Start = i - 1
	}
	return at
}

// editUsage makes the usage that of the whole answer: to the second engine, the text so far was prompt.
func (a *Answer) editUsage(list []edit, data []byte, at Span) []edit {
	var u Usage
	if !u.read(data[at.Start:at.End]) {
		return list
	}
	sum := u
	sum.PromptTokens = max(u.PromptTokens-a.seam.prompt, 0)
	sum.CompletionTokens = u.CompletionTokens + a.seam.tokens
	sum.TotalTokens = sum.PromptTokens + sum.CompletionTokens
	sum.CachedTokens = min(u.CachedTokens, sum.PromptTokens)
	a.Usage = sum
	s := scanner{b: data}
	s.members(at.Start, 2, func(key []byte, _ bool, v Span) bool {
		switch string(key) {
		case "prompt_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.PromptTokens), 10)})
		case "completion_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.CompletionTokens), 10)})
		case "total_tokens":
			list = append(list, edit{v, strconv.AppendInt(nil, int64(sum.TotalTokens), 10)})
		}
		return true
	})
	return list
}
