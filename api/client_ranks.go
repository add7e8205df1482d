package api

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/dpserve/dpserve/app"
)

// AddRank attaches an engine to an application of kind attach. rank is a map like an item of engine.ranks, in JSON or YAML. It
// returns once that is committed; App shows when the rank serves.
func (c *Client) AddRank(ctx context.Context, appName string, rank []byte) (RankChange, error) {
	var r RankReply
	err := c.call(ctx, http.MethodPost, appPath(appName)+pathRanks, nil, rank, &r)
	return r.RankChange, err
}

// RemoveRank lets go of an attached rank. It returns once that is committed, while the rank's streams go on; the rank is gone
// when App does not list it any more.
func (c *Client) RemoveRank(ctx context.Context, appName string, rm RankRemoval) (RankChange, error) {
	q := refQuery(rm.Rank)
	if rm.Deadline != nil {
		q.Set("deadline", rm.Deadline.String())
	}
	var r RankReply
	err := c.call(ctx, http.MethodDelete, appPath(appName)+pathRanks, q, nil, &r)
	return r.RankChange, err
}

// refQuery is the query that rankRef reads.
func refQuery(ref app.RankRef) url.Values {
	if ref.URL == "" {
		return url.Values{"rank": {ref.String()}}
	}
	q := url.Values{"url": {ref.URL}}
	if ref.Selector != nil {
		q.Set("selector", strconv.Itoa(*ref.Selector))
	}
	return q
}
