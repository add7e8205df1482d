package remote

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engineleg"
)

// fail answers that the request is none of this port's.
func (p *passage) fail(status int, cause string) (clean bool) {
	p.w.Header()[dataCause] = []string{cause}
	return p.own(status)
}

// failed answers that the engine gave no answer. The ticket is the ingress's to give back.
func (p *passage) failed(cause string, resent bool) (clean bool) {
	h := p.w.Header()
	p.ticketHeader(h)
	markResent(h, resent)
	return p.fail(http.StatusBadGateway, cause)
}

// refuse answers that there is no ticket.
func (p *passage) refuse(rep *msg.AdmitReply) (clean bool) {
	h := p.w.Header()
	h[dataRefused] = []string{rep.Refusal.String()}
	h[dataEpoch] = []string{strconv.FormatUint(rep.Epoch, 10)}
	h[dataSeq] = []string{strconv.FormatUint(rep.Seq, 10)}
	if ms := rep.RetryAfter.Milliseconds(); ms > 0 {
		h[dataRetryAfter] = []string{strconv.FormatInt(ms, 10)}
	}
	return p.own(http.StatusServiceUnavailable)
}

// own sends an answer without a body.
func (p *passage) own(status int) (clean bool) {
	p.w.Header()["Content-Length"] = []string{"0"}
	p.w.WriteHeader(status)
	return true
}

// ticketHeader names the ticket.
func (p *passage) ticketHeader(h http.Header) {
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

// answerHeader passes an engine's header on. What net/http would add of itself stays out: the ingress gets what the engine said.
func (p *passage) answerHeader(engine http.Header, resent bool) {
	h, hop := p.w.Header(), engineleg.HopNames(engine)
	h["Date"], h["Content-Type"] = nil, nil
	for name, values := range engine {
		if !engineleg.Hop(name) && !hop[name] && !strings.HasPrefix(name, dataPrefix) {
			h[name] = values
		}
	}
	p.ticketHeader(h)
	markResent(h, resent)
}
