package harness

import (
	"net/http"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
)

// Router is the public client of an app's Router, over the cluster's network. It ends with the test.
func (c *Cluster) Router(app string) *client.RouterClient {
	c.T.Helper()
	cl, err := client.New(c.node.AdminAddr(),
		client.WithTransport(&http.Transport{DialContext: c.Net.DialContext}))
	require.NoError(c.T, err)
	c.T.Cleanup(cl.Close)
	return cl.Router(app)
}
