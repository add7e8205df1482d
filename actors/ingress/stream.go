package ingress

import (
	"net/http"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// stream is the relay's view of a streamed answer: the bytes read and not yet sent on, and what their events
// mean.
type stream struct {
	buf         []byte
	filled      int // bytes in buf
	inspected   int // bytes of buf whose events are inspected and may pass
	searched    int // bytes after inspected that contain no end of an event
	watcher     openai.Watcher
	begun       bool        // content has passed
	rankEnds    func() bool // the rank gives up its requests because it ends
	tokens      int         // chunks with choices
	newTokens   int         // of them in this read
	lastToken   time.Time   // time of the last token
	inLongEvent bool        // inside an event that is too long to hold
	passedError bool        // an error event has passed
	engineError openai.EngineError
}

// reset prepares for an answer with the given number of choices.
func (s *stream) reset(choices int) {
	if s.buf == nil {
		s.buf = make([]byte, relayBuffer)
	}
	s.filled, s.inspected, s.searched, s.tokens, s.newTokens = 0, 0, 0, 0, 0
	s.begun = false
	s.inLongEvent, s.passedError, s.lastToken, s.engineError = false, false, time.Time{}, openai.EngineError{}
	s.watcher.Reset(choices)
}

// release drops a buffer that has grown, because most answers need none of it.
func (s *stream) release() {
	if len(s.buf) > 4*relayBuffer {
		s.buf = nil
	}
	s.tokens = 0
}

// dropSent removes the first n bytes, which the client has received.
func (s *stream) dropSent(n int) {
	copy(s.buf, s.buf[n:s.filled])
	s.filled -= n
	s.inspected -= n
}

// readSpace makes room for the next read: what has arrived waits for its end.
func (s *stream) readSpace() []byte {
	if s.filled == len(s.buf) {
		b := make([]byte, 2*len(s.buf))
		copy(b, s.buf)
		s.buf = b
	}
	return s.buf[s.filled:]
}

// streamAction is what an event means for the stream.
type streamAction uint8

const (
	actionContinue streamAction = iota // keep reading
	actionCommit                       // the first byte: send the header and everything held
	actionFail                         // the stream is broken
	actionReject                       // before the first byte: an error event, treated as an HTTP answer
	actionAborted                      // before the first byte: the engine gave the request up
	actionEmpty                        // before the first byte: the stream is over
	actionFinish                       // [DONE] of a complete stream
)

// inspectEvents inspects the complete events. It stops at the first event that decides something. An event
// that opens the stream or ends it well is then counted in inspected; an event that breaks the stream is not.
func (s *stream) inspectEvents(begun bool) streamAction {
	s.newTokens = 0
	for {
		n := s.nextEventLen()
		if n < 0 {
			return actionContinue
		}
		event := s.buf[s.inspected : s.inspected+n]
		if v := s.applyEvent(s.watcher.Event(event), event, begun); v != actionContinue {
			return v
		}
		s.inspected += n
	}
}

// nextEventLen is the length of the next complete event; -1 if there is none yet.
func (s *stream) nextEventLen() int {
	rest := s.buf[s.inspected:s.filled]
	n := openai.EventEnd(rest, s.searched)
	s.searched = len(rest)
	if n >= 0 {
		s.searched = 0
	}
	return n
}

// applyEvent returns what one event means for the stream.
func (s *stream) applyEvent(kind openai.EventKind, event []byte, begun bool) streamAction {
	switch kind {
	case openai.EventError:
		return s.applyErrorEvent(event, begun)
	case openai.EventAbort:
		switch {
		case !begun:
			return actionAborted
		case s.rankEnds():
			return actionFail
		}
		s.countToken()
		return actionContinue
	case openai.EventDone:
		return s.applyDoneEvent(len(event), begun)
	case openai.EventOther:
		return actionContinue
	case openai.EventEmpty:
		s.countToken()
		return actionContinue
	default:
		s.countToken()
	}
	if !begun {
		s.inspected += len(event)
		return actionCommit
	}
	return actionContinue
}

func (s *stream) countToken() {
	s.tokens++
	s.newTokens++
}

// applyErrorEvent lets an error pass after the first byte: the client gets the engine's own words, unless
// they say that the engine is lost.
func (s *stream) applyErrorEvent(event []byte, begun bool) streamAction {
	s.engineError = openai.ParseError(openai.EventData(event))
	switch {
	case !begun:
		return actionReject
	case s.engineError.IsDead():
		return actionFail
	}
	if s.engineError.Status == 0 {
		s.engineError.Status = http.StatusInternalServerError
	}
	s.passedError = true
	return actionContinue
}

// applyDoneEvent lets [DONE] pass only at the end of a complete stream: [DONE] alone proves nothing.
func (s *stream) applyDoneEvent(n int, begun bool) streamAction {
	switch {
	case !begun:
		return actionEmpty
	case !s.passedError && !s.watcher.Complete():
		return actionFail
	}
	s.inspected += n
	return actionFinish
}

// endOfBody decides about a stream whose body has ended cleanly. Remaining bytes without a blank line are an
// event too.
func (s *stream) endOfBody(begun bool) streamAction {
	if rest := s.buf[s.inspected:s.filled]; len(rest) > 0 && !s.inLongEvent {
		if v := s.applyEvent(s.watcher.Event(rest), rest, begun); v != actionContinue {
			return v
		}
	}
	s.inspected = s.filled
	switch {
	case !begun:
		return actionEmpty
	case s.passedError || s.watcher.Complete():
		return actionFinish
	default:
		return actionFail
	}
}

// inspectRead inspects what a read has brought.
func (s *stream) inspectRead(begun bool) streamAction {
	if s.inLongEvent {
		if v := s.passLongEvent(begun); v != actionContinue || s.inLongEvent {
			return v
		}
	}
	if v := s.inspectEvents(begun); v != actionContinue {
		return v
	}
	switch {
	case s.filled-s.inspected >= openai.MaxEvent: // too much to wait for the end of the event
		return s.passLongEvent(begun)
	case !begun && s.inspected > maxHeld:
		return actionCommit // too many role-only chunks to hold: the stream begins without content
	}
	return actionContinue
}

// passLongEvent lets an event that is too long to hold pass as it arrives. Later bytes show its end; a few
// bytes stay, because the blank line may be cut in two.
func (s *stream) passLongEvent(begun bool) streamAction {
	if !s.inLongEvent {
		from, event := s.inspected, s.buf[s.inspected:s.filled]
		if v := s.applyEvent(s.watcher.Event(event), event, begun); v != actionContinue && v != actionCommit {
			return v
		}
		s.inspected, s.inLongEvent = from, true
		s.watcher.Blind()
	}
	if n := openai.EventEnd(s.buf[s.inspected:s.filled], 0); n >= 0 {
		s.inspected, s.inLongEvent, s.searched = s.inspected+n, false, 0
	} else {
		s.inspected = max(s.inspected, s.filled-len("\n\r\n"))
	}
	if !begun {
		return actionCommit
	}
	return actionContinue
}
