package ingress

import (
	"net/http"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
)

// stream is the relay's view of a streamed answer: the bytes read and not yet passed on, and what their events said.
type stream struct {
	buf      []byte
	filled   int // bytes in buf
	looked   int // bytes of buf whose events are looked at and may pass
	searched int // bytes behind looked without the end of an event
	watcher  openai.Watcher
	tokens   int       // chunks with choices
	fresh    int       // of them in this read
	last     time.Time // of the last token
	long     bool      // inside an event too long to be held: it passes as it comes
	done     bool      // [DONE] has come
	failed   bool      // an error event below 500 has passed
	fault    openai.EngineError
}

// reset prepares for an answer with the given number of choices.
func (s *stream) reset(choices int) {
	if s.buf == nil {
		s.buf = make([]byte, relayBuffer)
	}
	s.filled, s.looked, s.searched, s.tokens, s.fresh = 0, 0, 0, 0, 0
	s.long, s.done, s.failed, s.last, s.fault = false, false, false, time.Time{}, openai.EngineError{}
	s.watcher.Reset(choices)
}

// release drops a buffer that has grown: most answers need none of it.
func (s *stream) release() {
	if len(s.buf) > 4*relayBuffer {
		s.buf = nil
	}
	s.tokens = 0
}

func (s *stream) grow() {
	b := make([]byte, 2*len(s.buf))
	copy(b, s.buf[:s.filled])
	s.buf = b
}

// passed drops the first n bytes, which have gone to the client.
func (s *stream) passed(n int) {
	copy(s.buf, s.buf[n:s.filled])
	s.filled -= n
	s.looked -= n
}

// space makes room for the next read: a half event waits for its end, up to MaxEvent.
func (s *stream) space() []byte {
	if s.filled == len(s.buf) {
		s.grow()
	}
	return s.buf[s.filled:]
}

// half says that the bytes behind looked are too many for an event to wait for its end.
func (s *stream) half() bool { return s.filled-s.looked >= openai.MaxEvent }

// verdict is what an event means for the stream.
type verdict uint8

const (
	more    verdict = iota // nothing to decide: read on
	opened                 // the first byte: header and everything held may go
	lost                   // the stream cannot end well
	refused                // before the first byte: an error event, to be treated as an HTTP answer
	aborted                // before the first byte: the engine gave up
	nothing                // before the first byte: the stream is over
	over                   // [DONE] of a complete stream
)

// look judges the events that are whole. It stops at the first that decides something: an event that opens the stream or
// ends it well is then within looked, one that breaks it is not.
func (s *stream) look(begun bool) verdict {
	s.fresh = 0
	for {
		n := s.next()
		if n < 0 {
			return more
		}
		event := s.buf[s.looked : s.looked+n]
		if v := s.judge(s.watcher.Event(event), event, begun); v != more {
			return v
		}
		s.looked += n
	}
}

// next is the length of the next whole event; -1 if there is none yet.
func (s *stream) next() int {
	rest := s.buf[s.looked:s.filled]
	n := openai.EventEnd(rest, s.searched)
	s.searched = len(rest)
	if n >= 0 {
		s.searched = 0
	}
	return n
}

// judge says what one event does to the stream.
func (s *stream) judge(kind openai.EventKind, event []byte, begun bool) verdict {
	switch kind {
	case openai.EventError:
		return s.onError(event, begun)
	case openai.EventAbort:
		if begun {
			return lost
		}
		return aborted
	case openai.EventDone:
		return s.onDone(len(event), begun)
	case openai.EventOther:
		return more
	case openai.EventEmpty:
		s.token()
		return more
	default:
		s.token()
	}
	if !begun {
		s.looked += len(event)
		return opened
	}
	return more
}

func (s *stream) token() {
	s.tokens++
	s.fresh++
}

// onError passes an error below 500 that comes after the first byte; everything else is not the client's to see.
func (s *stream) onError(event []byte, begun bool) verdict {
	s.fault = openai.ParseError(openai.EventData(event))
	switch {
	case !begun:
		return refused
	case s.fault.Status == 0 || s.fault.Status >= http.StatusInternalServerError:
		return lost
	}
	s.failed = true
	return more
}

// onDone lets [DONE] pass only behind a complete stream: by itself it proves nothing.
func (s *stream) onDone(n int, begun bool) verdict {
	switch {
	case !begun:
		return nothing
	case !s.failed && !s.watcher.Complete():
		return lost
	}
	s.looked += n
	s.done = true
	return over
}

// ended judges a stream whose body has ended cleanly. What is left without a blank line is an event too.
func (s *stream) ended(begun bool) verdict {
	if rest := s.buf[s.looked:s.filled]; len(rest) > 0 && !s.long {
		if v := s.judge(s.watcher.Event(rest), rest, begun); v != more {
			return v
		}
	}
	s.looked = s.filled
	switch {
	case !begun:
		return nothing
	case s.failed || s.watcher.Complete():
		return over
	default:
		return lost
	}
}

// examine looks at what a read has brought.
func (s *stream) examine(begun bool) verdict {
	if s.long {
		if v := s.overlong(begun); v != more || s.long {
			return v
		}
	}
	if v := s.look(begun); v != more {
		return v
	}
	switch {
	case s.half():
		return s.overlong(begun)
	case !begun && s.looked > maxHeld:
		return opened // too many role-only chunks to hold: the stream begins without content
	}
	return more
}

// overlong lets an event pass that is too long to be held, as far as it has come. Its end is found by what follows; a few
// bytes stay, because the blank line may be cut in two.
func (s *stream) overlong(begun bool) verdict {
	if !s.long {
		from, event := s.looked, s.buf[s.looked:s.filled]
		if v := s.judge(s.watcher.Event(event), event, begun); v != more && v != opened {
			return v
		}
		s.looked, s.long = from, true
		s.watcher.Blind()
	}
	if n := openai.EventEnd(s.buf[s.looked:s.filled], 0); n >= 0 {
		s.looked, s.long, s.searched = s.looked+n, false, 0
	} else {
		s.looked = max(s.looked, s.filled-len("\n\r\n"))
	}
	if !begun {
		return opened
	}
	return more
}
