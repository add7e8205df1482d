package remote

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engineleg"
)

// answerError answers a request that this port does not pass on.
func (p *dataRequest) answerError(status int, cause string) (clean bool) {
	p.w.Header()[dataCause] = []string{cause}
	return p.answerEmpty(status)
}

// answerEngineError answers that the engine gave no answer. The ingress gives the ticket back.
func (p *dataRequest) answerEngineError(cause string, resent bool) (clean bool) {
	h := p.w.Header()
	p.setTicketHeader(h)
	markResent(h, resent)
	return p.answerError(http.StatusBadGateway, cause)
}

// refuse answers that there is no ticket.
func (p *dataRequest) refuse(rep *msg.AdmitReply) (clean bool) {
	h := p.w.Header()
	h[dataRefused] = []string{rep.Refusal.String()}
	h[dataEpoch] = []string{strconv.FormatUint(rep.Epoch, 10)}
	h[dataSeq] = []string{strconv.FormatUint(rep.Seq, 10)}
	if ms := rep.RetryAfter.Milliseconds(); ms > 0 {
		h[dataRetryAfter] = []string{strconv.FormatInt(ms, 10)}
	}
	return p.answerEmpty(http.StatusServiceUnavailable)
}

// answerEmpty sends an answer without a body.
func (p *dataRequest) answerEmpty(status int) (clean bool) {
	p.w.Header()["Content-Length"] = []string{"0"}
	p.w.WriteHeader(status)
	return true
}

// setTicketHeader writes the ticket into the header.
func (p *dataRequest) setTicketHeader(h http.Header) {
	if p.ticket.ID == 0 {
		return
	}
	h[dataTicket] = []string{strconv.FormatUint(p.ticket.ID, 10)}
	h[dataSeq] = []string{strconv.FormatUint(p.ticket.Seq, 10)}
	h[dataInc] = []string{strconv.FormatUint(p.ticket.Incarnation, 10)}
	h[dataEpoch] = []string{strconv.FormatUint(p.ticket.Epoch, 10)}
}

func markResent(h http.Header, resent bool) {
	if resent {
		h[dataResent] = []string{"1"}
	}
}

// copyEngineHeader copies an engine's header to the answer. Date and Content-Type are set to nil, because
// net/http would add its own.
func (p *dataRequest) copyEngineHeader(engine http.Header, resent bool) {
	h, hop := p.w.Header(), engineleg.HopNames(engine)
	h["Date"], h["Content-Type"] = nil, nil
	for name, values := range engine {
		if !engineleg.Hop(name) && !hop[name] && !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	p.setTicketHeader(h)
	markResent(h, resent)
}
