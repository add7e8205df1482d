package client

import (
	"fmt"
	"strings"
	"time"
)

// Imbalance says that the ranks of an application, or of one of its pools, are loaded unevenly. The load of a
// rank is the prompt and generated tokens of its open requests, the mean of the last minute.
type Imbalance struct {
	Pool    string     `json:"pool"`        // its name: that of the application if it has one pool
	MaxMean float64    `json:"max_mean"`    // load of the fullest rank over the mean of all ranks; 1 is even
	Mean    int        `json:"mean_tokens"` // of all ranks
	Ranks   []RankLoad `json:"ranks"`       // those far above the mean, the fullest first
	Policy  string     `json:"policy"`
	// routing policies that go by this load; empty: the application has one of them
	Policies []string  `json:"policies,omitempty"`
	Since    time.Time `json:"since"`
}

// RankLoad is the load of one rank.
type RankLoad struct {
	Rank   string `json:"rank"` // APP/GROUP/RANK
	Tokens int    `json:"tokens"`
}

// maxUnevenRanks is how many ranks a sentence names.
const maxUnevenRanks = 8

// String returns the sentence that status, doctor and events show.
func (i *Imbalance) String() string {
	var ranks []string
	for n, r := range i.Ranks {
		if n == maxUnevenRanks {
			ranks = append(ranks, fmt.Sprintf("%d more", len(i.Ranks)-n))
			break
		}
		ranks = append(ranks, fmt.Sprintf("%s (%d tokens)", r.Rank, r.Tokens))
	}
	return fmt.Sprintf("uneven load, max/mean %.1f: %s; the mean of its ranks is %d tokens in flight; %s",
		i.MaxMean, strings.Join(ranks, ", "), i.Mean, i.advice())
}

// advice names the policies that would balance the ranks.
func (i *Imbalance) advice() string {
	last := len(i.Policies) - 1
	switch {
	case last < 0:
		return "its policy " + i.Policy + " knows this load: a cached prefix or a long request outweighs it"
	case last == 0:
		return "policy " + i.Policies[0] + " would balance it"
	}
	return "policy " + strings.Join(i.Policies[:last], ", ") + " or " + i.Policies[last] + " would balance it"
}
