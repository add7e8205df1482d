// Package continuation makes one answer of two streams: the first one broke, and another engine goes on with
// its text. It keeps the text of the first stream, makes the request for the rest, and makes the events of
// the second engine those of the first one's stream. It does no IO.
package continuation

import (
	"bytes"
	"slices"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// identity is what is equal in all chunks of one stream, as written.
type identity struct{ id, created, model []byte }

// Answer is the text of a stream, read from its chunks, and what makes a second stream the rest of it. Reset
// begins it; its memory is used again. Not safe for concurrent use.
type Answer struct {
	Text   []byte       // that the client has, decoded
	Tokens int          // chunks with a token so far
	Usage  openai.Usage // of the whole answer; zero before the second engine has told its own

	identity identity
	usual    usualChunk
	isPinned bool // it cannot go on from another engine
	chunk    chunk
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
		identity: identity{a.identity.id[:0], a.identity.created[:0], a.identity.model[:0]},
		usual:    usualChunk{a.usual.head[:0], a.usual.tail[:0]},
		seam:     seam{expect: a.seam.expect[:0], head: a.seam.head[:0], held: a.seam.held[:0]},
	}
}

// MayGoOn reports whether another engine may go on: there is text, and nothing else has been shown.
func (a *Answer) MayGoOn() bool { return !a.isPinned && len(a.Text) > 0 }

// Read reads an event that passes to the client unchanged.
func (a *Answer) Read(event []byte) {
	if a.isPinned {
		return
	}
	data := openai.EventData(event)
	if raw, ok := a.usual.textOf(data); ok {
		a.add(raw)
		return
	}
	if len(data) == 0 || data[0] == '[' {
		return
	}
	k := &a.chunk
	if !k.read(data) || k.isOther || k.choices > 1 {
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
	case k.hasToken() && !k.isFinished:
		a.countToken() // a character is incomplete
	}
	if isText && k.role == (openai.Span{}) && !k.isFinished {
		a.usual.head = append(a.usual.head[:0], data[:k.content.Start+1]...)
		a.usual.tail = append(a.usual.tail[:0], data[k.content.End-1:]...)
	}
}

// add adds the text of one token, as written between its quotes.
func (a *Answer) add(raw []byte) {
	if bytes.IndexByte(raw, '\\') < 0 {
		a.Text = append(a.Text, raw...)
	} else {
		a.Text = openai.Unescape(a.Text, raw)
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

// Continue prepares for the stream of another engine. It returns the text that the prompt of that engine ends
// with, and its number of tokens. stops are the request's stop strings. trims: the chat template cuts white
// space from the end of a message.
//
// An engine looks for stop strings only in what it generates. So what may be the beginning of one is not
// sent, nor white space that would be cut: the engine generates it again, and AppendEvent leaves it out.
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

// AppendEvent appends an event of the second engine as the client gets it: as one of the first engine's
// stream. An event that shows nothing new is left out.
func (a *Answer) AppendEvent(dst, event []byte) ([]byte, error) {
	data := openai.EventData(event)
	if len(data) == 0 || data[0] == '[' {
		return append(dst, event...), nil
	}
	k := &a.chunk
	switch {
	case !k.read(data), k.isOther, k.choices > 1,
		k.role != openai.Span{} && string(data[k.role.Start:k.role.End]) != `"assistant"`:
		return dst, ErrAnotherAnswer
	}
	var raw []byte
	if k.content != (openai.Span{}) {
		raw = openai.Unescape(nil, data[k.content.Start+1:k.content.End-1])
	}
	fresh, err := a.seam.pass(raw, k.isFinished)
	if err != nil {
		return dst, err
	}
	var edits [8]edit
	list := edits[:0]
	switch {
	case len(fresh) == len(raw):
	case k.content != (openai.Span{}):
		list = append(list, edit{k.content, openai.AppendString(nil, string(fresh))})
	case k.delta != (openai.Span{}): // the chunk that ends the answer has no text of its own
		text := append(openai.AppendString([]byte(`{"content":`), string(fresh)), '}')
		list, k.role = append(list, edit{k.delta, text}), openai.Span{}
	default:
		return dst, ErrAnotherAnswer
	}
	list = k.editIdentity(list, data, &a.identity)
	if k.usage != (openai.Span{}) {
		list = a.editUsage(list, data, k.usage)
	}
	a.Text = append(a.Text, fresh...)
	switch {
	case !k.hasToken(), k.isFinished && len(raw) == 0:
	case a.seam.again > 0:
		a.seam.again--
	default:
		a.countToken()
	}
	if k.choices > 0 && len(fresh) == 0 && !k.isFinished && k.usage == (openai.Span{}) {
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
